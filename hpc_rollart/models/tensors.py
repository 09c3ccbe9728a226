"""Which tensors of a policy travel in weight sync: the one list that trainer and generators share."""

from torch import Tensor
from transformers import PreTrainedModel


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter and persistent buffer of `model`, detached, by its name in the `state_dict`.

    Tied weights appear once, under their first name (`model.embed_tokens.weight`, not `lm_head.weight`):
    copying into that tensor of an equally tied model updates both.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in persistent}
