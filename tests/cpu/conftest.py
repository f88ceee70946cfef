"""Checkpoint folders that many tests read; nobody may write into them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer.log
from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import ModelConfig
from deepinfer.testing.tiny import tiny_config, write_random_checkpoint

# Three layers with every kind of tensor: for tests that write or load a checkpoint many times.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "compress_ratios": [0, 2, 1, 0],
    "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2],
    "candidate_source_layer_id": 2, "engram_layer_ids": [1], "engram_vocab_size": 16,
    "dspark_target_layer_ids": [1, 2], "n_routed_experts": 2, "dspark_n_routed_experts": 2,
}  # fmt: skip

# One layer that keeps nothing in pages.
NO_CACHE: dict[str, Any] = {
    "num_hidden_layers": 1, "num_nextn_predict_layers": 0, "compress_ratios": [0],
    "kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": -1,
    "engram_layer_ids": [], "dspark_target_layer_ids": [], "n_routed_experts": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with outliers in its weights: 9 layers, every feature on."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_random_checkpoint(folder, seed=1, outliers=True)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers that loads in a few milliseconds."""
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    write_random_checkpoint(folder, tiny_config(**SMALL), seed=2)
    return folder


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose model nobody runs (tests/cpu/engine_stub.py): pages may have any size."""
    folder = tmp_path_factory.mktemp("stub") / "checkpoint"
    write_random_checkpoint(folder, tiny_config(**NO_CACHE), seed=3)
    return folder


@pytest.fixture(scope="session")
def oracle_folder() -> Path:
    """The checkpoint of the independent implementation."""
    return Path(__file__).parents[1] / "oracle"


@pytest.fixture(scope="session")
def released() -> ModelConfig:
    """The released model's configuration."""
    return parse_model_config(RELEASED_CONFIG)


@pytest.fixture
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that other tests have caused already are said again in this one."""
    monkeypatch.setattr(deepinfer.log, "_said", set())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A second thread brings little to thousands of small operations, and where another process has
    its core, each of them waits: the tests that use this took four times as long then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
