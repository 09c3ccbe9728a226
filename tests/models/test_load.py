"""Loading a policy from a folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_rollart.models.load import ModelError, load_model, load_tokenizer
from hpc_rollart.models.tiny import build_model, build_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer(["hello"])
    build_model(tokenizer, 32, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_hub_name_is_a_missing_folder_not_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("went to the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ModelError, match="no model folder at HuggingFaceTB/SmolLM2"):
        load_model(Path("HuggingFaceTB/SmolLM2"), torch.float32)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_missing_file_is_named_in_one_line(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError) as caught:
        load_model(folder, torch.float32)
    assert str(folder) in str(caught.value)
    assert name.removeprefix("model") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_lack_a_tensor_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, such as model\.layers\.1\.mlp\.up_proj"):
        load_model(folder, torch.float32)


def test_a_tokenizer_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(folder)


def test_the_wanted_type_is_loaded(folder: Path) -> None:
    assert load_model(folder, torch.bfloat16).dtype == torch.bfloat16
    assert load_model(folder, torch.float32).dtype == torch.float32
