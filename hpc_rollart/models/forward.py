"""What every kind of training of a policy shares: its forward pass, and which parameters decay."""

from torch import Tensor, nn
from transformers import PreTrainedModel


def hidden_states(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Last hidden states (rows, length, width) of right-padded `input_ids`; attention is causal, unmasked."""
    hidden: Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's parameter groups: matrices are decayed; norms, biases and embeddings are not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        (kept if parameter.ndim < 2 or id(parameter) in embeddings else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
