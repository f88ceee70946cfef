"""A trace of some steps: written once, and never the end of anything else."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError
from tests.cpu.engine_helpers import assert_idle, ids_of, small_llm
from tests.cpu.engine_stub import StubRunner, stub_llm

FIVE = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)


@pytest.fixture
def llm(stub_folder: Path) -> LLM:
    return stub_llm(stub_folder)


def test_steps_are_recorded(llm: LLM, tmp_path: Path) -> None:
    expected = ids_of(llm.generate([5, 6], FIVE))
    llm.profile(tmp_path / "trace.json", 3)
    with pytest.raises(ConfigError, match="being recorded"):
        llm.profile(tmp_path / "other.json", 1)
    assert ids_of(llm.generate([5, 6], FIVE)) == expected
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    llm.profile(tmp_path / "other.json", 1)
    llm.generate([5, 6], FIVE)
    assert (tmp_path / "other.json").exists()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_senseless_numbers_of_steps(llm: LLM, tmp_path: Path, steps: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        llm.profile(tmp_path / "trace.json", steps)


def test_a_file_that_cannot_be_written(llm: LLM, tmp_path: Path) -> None:
    """Said at once where that can be seen; later it costs the trace and nothing else."""
    for wrong in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(ConfigError, match="a folder that exists"):
            llm.profile(wrong, 1)
    expected = ids_of(llm.generate([5, 6], FIVE))
    (tmp_path / "gone").mkdir()
    llm.profile(tmp_path / "gone" / "trace.json", 2)
    (tmp_path / "gone").rmdir()
    assert ids_of(llm.generate([5, 6], FIVE)) == expected
    llm.profile(tmp_path / "trace.json", 1)
    assert ids_of(llm.generate([5, 6], FIVE)) == expected
    assert (tmp_path / "trace.json").exists()
    assert_idle(llm)


def test_a_step_that_breaks_off_ends_the_recording(llm: LLM, tmp_path: Path) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, StubRunner)

    def interrupt(rows: list[list[int]]) -> None:
        runner.before = lambda rows: None
        raise KeyboardInterrupt

    runner.before = interrupt
    llm.profile(tmp_path / "trace.json", 1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6], FIVE)
    assert (tmp_path / "trace.json").exists()
    llm.profile(tmp_path / "other.json", 1)
    llm.generate([5, 6], FIVE)
    assert (tmp_path / "other.json").exists()


def test_a_recording_without_an_end_is_written(small_folder: Path, tmp_path: Path) -> None:
    """When the process ends: a profiler that runs on would take it down."""
    code = (
        "import sys; from deepinfer import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], threads=1); llm.profile(sys.argv[2], steps=50)\n"
        "llm.generate([5, 6], SamplingParams(max_tokens=2))\n"
    )
    file = tmp_path / "trace.json"
    command = [sys.executable, "-c", code, str(small_folder), str(file)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert json.loads(file.read_text())["traceEvents"]


def test_a_line_is_logged(small_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = small_llm(small_folder, log_interval=1e-6)
    llm.generate([5, 6], SamplingParams(max_tokens=2))
    assert any("generated tokens/s" in record.getMessage() for record in caplog.records)
    logging.getLogger("deepinfer").setLevel(logging.NOTSET)
