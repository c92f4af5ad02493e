"""A full disk in an export names the file."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from megatron_fp8rl.weight_sync import save_hf


def test_a_full_disk_names_the_file_of_weights(tmp_path, monkeypatch):
    def full(tensors, file, metadata):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(save_hf, "save_file", full)
    gather = SimpleNamespace(whole=torch.zeros(4), transfer=SimpleNamespace(name="a"))
    file = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match=rf"No space left on device .*: cannot write {file}. Check its free space"):
        save_hf._write_shard([gather], file)


def test_a_full_disk_names_the_configuration():
    with pytest.raises(OSError, match="No space left on device: cannot write") as error:
        save_hf.write_json(save_hf.Path("/dev/full"), {"a": "b" * 100_000})
    assert error.value.filename == "/dev/full"
