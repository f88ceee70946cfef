"""The oracle's checkpoint and files, and dumps of our own for each of its cases."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

import deepinfer.commands.dump as command
from deepinfer.config import DtypeName, EngineOptions
from deepinfer.engine.loading import load

FOLDER = Path(__file__).parent
CASES = 7

# (dtype, act_quant, mode, case) to the tensors that `deepinfer dump` writes.
Dump = Callable[[DtypeName, bool, str, int], dict[str, Tensor]]


@cache
def oracle_file(dtype: str, act_quant: bool) -> dict[str, Tensor]:
    """Tensors of one file of the independent implementation."""
    return load_file(FOLDER / f"oracle-{dtype}{'-actq' if act_quant else ''}.safetensors")


@pytest.fixture(scope="session")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    """Our own outputs for a case, read back from the file that the command wrote.

    The checkpoint is loaded once for each kind of arithmetic, not for each of the dumps.
    """
    out = tmp_path_factory.mktemp("dumps") / "dump.safetensors"
    patch = pytest.MonkeyPatch()
    patch.setattr(command, "load", cache(load))

    @cache
    def one(dtype: DtypeName, act_quant: bool, mode: str, case: int) -> dict[str, Tensor]:
        ids = oracle_file("float32", act_quant)[f"case{case}.input_ids"].tolist()
        options = EngineOptions(model=str(FOLDER), dtype=dtype, act_quant=act_quant, threads=1)
        command.dump(options, ids, out, mode)
        return load_file(out)

    yield one
    patch.undo()
