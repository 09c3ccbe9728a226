"""Loading a policy and its tokenizer from a local folder, and never from the network."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hpc_rollart.models.folder import ModelError, check_folder

__all__ = ["ModelError", "check_folder", "load_model", "load_tokenizer"]

# Bars of transformers' own, one a rank, would fill the logs.
logging.disable_progress_bar()


def load_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the causal language model in `directory`, in evaluation mode, on the CPU.

    Parameters
    ----------
    directory
        Folder in Hugging Face format, with safetensors.
    dtype
        The trainer needs float32 (its master weights); a generator takes what it serves.

    Raises
    ------
    ModelError
        If files are missing or the weights do not fit the architecture.
    """
    check_folder(directory)
    found: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    model, report = found
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"the weights in {directory} lack {len(missing)} tensors, such as {missing[0]}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `directory`; it must have a chat template.

    Raises
    ------
    ModelError
        If files are missing or there is no chat template.
    """
    check_folder(directory)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer in {directory} has no chat template; use an instruction-tuned model")
    return tokenizer
