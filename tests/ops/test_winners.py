"""Measured winners: from rows of a benchmark to the kernel that runs for so many rows."""

import json
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops import select as selection
from deepinfer.ops.registry import specs
from deepinfer.ops.select import Wishes, select
from deepinfer.ops.winners import Bucket, ByRows, describe, winners

ROOT = Path(__file__).resolve().parents[2]
TABLE = json.loads((ROOT / "deepinfer" / "ops" / "winners.json").read_text(encoding="utf-8"))
BUCKETS = {"sparse_attention": (Bucket(24, "triton_split"), Bucket(None, "triton"))}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "winners", lambda gpu: BUCKETS if gpu == "some card" else {})


def choice(**wishes: object) -> selection.Operator:
    given = {"device": "cuda", "gpu": "some card", **wishes}
    return select(Wishes(**given)).sparse_attention  # type: ignore[arg-type]


@pytest.mark.usefixtures("measured")
def test_what_was_measured_comes_before_the_order() -> None:
    fastest = choice()
    assert fastest.backend == "triton_split to 24 rows, triton"
    assert fastest.reason == "fastest on some card"
    assert choice(backend="triton").backend == fastest.backend
    assert choice(gpu="another").backend == "triton"


@pytest.mark.usefixtures("measured")
def test_what_comes_before_measurements() -> None:
    assert choice(backend="ref").backend == "ref"
    assert choice(operators={"sparse_attention": "triton"}).backend == "triton"
    assert choice(batch_invariant=True).backend == "triton"


def test_rows_decide() -> None:
    def refuse(x: torch.Tensor) -> str:
        raise Unsupported("never")

    pick = ByRows([
        (2, [lambda x: "few"]), (8, [refuse, lambda x: "some"]), (None, [lambda x: "many"]),
    ])  # fmt: skip
    found = [pick(torch.zeros(rows, 1)) for rows in (0, 2, 3, 8, 9, 500)]
    assert found == ["few", "few", "some", "some", "many", "many"]


def test_from_rows_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from winners import table  # type: ignore[import-not-found]

    def line(rows: int, backend: str, median: float, **more: object) -> dict[str, object]:
        return {"operator": "attend", "rows": rows, "backend": backend, "median": median, **more}

    lines = [
        line(1, "slow_start", 9.0), line(1, "quick_start", 3.0), line(1, "ref", 1.0),
        line(16, "slow_start", 9.0), line(16, "quick_start", 8.0),
        line(64, "slow_start", 9.0), line(64, "quick_start", 20.0),
        line(64, "cuBLAS", 1.0, baseline=True), line(64, "broken", 0.0, failed="wrong"),
        line(64, "torch", 1.0), line(64, "slow_start_exact", 1.0),
        {"operator": "alone", "rows": 1, "backend": "triton", "median": 1.0},
    ]  # fmt: skip
    assert table(lines) == {"attend": [[32, "quick_start"], [None, "slow_start"]]}


def test_the_committed_table_follows_from_the_committed_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import winners as program

    written = tmp_path / "winners.json"
    written.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(program, "TABLE", written)
    files = sorted(map(str, (ROOT / "benchmarks" / "results").glob("*.jsonl")))
    monkeypatch.setattr(sys, "argv", ["winners.py", *files])
    program.main()
    assert json.loads(written.read_text(encoding="utf-8")) == TABLE


def test_the_committed_table_names_what_exists() -> None:
    for gpu, operators in TABLE.items():
        assert winners(gpu).keys() == operators.keys()
        for name, buckets in winners(gpu).items():
            known = {backend.name for backend in specs()[name].backends}
            assert {bucket.backend for bucket in buckets} <= known
            limits = [bucket.rows for bucket in buckets]
            assert limits[-1] is None
            assert limits[:-1] == sorted(limits[:-1])
            assert describe(buckets)
