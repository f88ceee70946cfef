"""Memory plans: every byte is accounted for, more memory never fits less, advice helps."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.commands.doctor import plan_for
from deepinfer.config import EngineConfig, EngineOptions, Host, resolve
from deepinfer.engine import loading
from deepinfer.errors import ConfigError
from deepinfer.kv.plan import MemoryPlan, plan_memory, weight_bytes
from deepinfer.model.linear import Precision

RELEASED = parse_model_config(RELEASED_CONFIG)
PACKED = weight_bytes(RELEASED, None)
GIB = 2**30
DEMO = Path(__file__).parents[2] / "models" / "demo"


def settings(**given: object) -> EngineConfig:
    options = EngineOptions("folder", device="cuda", **given)  # type: ignore[arg-type]
    return resolve(options, {}, RELEASED, Host(cuda=True, cores=1))[0]


def planned(memory: float, gpus: int = 8, **given: object) -> MemoryPlan:
    return plan_memory(RELEASED, settings(**given), int(memory * GIB), PACKED, gpus)


def test_released_weights_are_as_large_as_the_checkpoint() -> None:
    """510 GB on disk; FP4 experts 279 GB of them, n-gram tables 203 GB."""
    whole = PACKED.experts + PACKED.tables + PACKED.other
    assert 505e9 < whole < 515e9
    assert 275e9 < PACKED.experts < 300e9
    assert PACKED.on_each(1) == whole
    assert PACKED.on_each(8) < whole / 8 + PACKED.other


@given(memory=st.floats(1, 300), gpus=st.integers(1, 16), sequences=st.integers(1, 256),
       checkpoints=st.integers(1, 500))  # fmt: skip
def test_parts_never_exceed_what_is_usable(
    memory: float, gpus: int, sequences: int, checkpoints: int
) -> None:
    plan = planned(memory, gpus, max_num_seqs=sequences, prefix_checkpoints=checkpoints)
    parts = plan.weights + plan.workspace + plan.graphs + plan.states
    if plan.pages:
        assert parts + plan.pages * plan.page <= plan.usable < memory * GIB
        assert parts + (plan.pages + 1) * plan.page > plan.usable
    assert plan.fits == (not plan.advice)
    assert planned(memory + 1, gpus, max_num_seqs=sequences,
                   prefix_checkpoints=checkpoints).pages >= plan.pages  # fmt: skip


def test_advice_is_right() -> None:
    (advice,) = planned(141, gpus=1).advice
    assert "at least 5 such GPUs" in advice
    assert "need at least" not in " ".join(planned(141, gpus=5).advice)
    assert planned(141, gpus=5).weights < planned(141, gpus=5).usable < planned(141, 4).weights
    assert planned(8).advice == (
        "no number of such GPUs: what each has to hold is larger than its memory",
    )


@pytest.mark.parametrize("memory", [77.6, 77.8, 78.0, 78.2, 78.4])
def test_each_setting_that_is_advised_alone_makes_it_fit(memory: float) -> None:
    plan = planned(memory, max_num_seqs=64)
    for entry in plan.advice:
        name, _, value = entry.partition(" = ")
        if value:
            given = {name: float(value) if "." in value else int(value)}
            assert planned(memory, max_num_seqs=64, **given).fits, entry


def test_longer_sequences_need_more() -> None:
    short, long = planned(80), planned(80, max_model_len=500_000, cache_tokens=500_000)
    assert short.wanted_pages == 512
    assert long.wanted_pages == 7813
    assert long.workspace > short.workspace
    assert short.fits
    assert not long.fits


def test_smaller_settings_leave_more_pages() -> None:
    base = planned(96)
    for change in ({"max_num_seqs": 4}, {"max_num_batched_tokens": 64}, {"enforce_eager": True},
                   {"prefix_checkpoints": 0}):  # fmt: skip
        assert planned(96, **change).pages > base.pages, change


def test_common_gpus() -> None:
    """What the released checkpoint fits, by the names of people's machines."""
    found = {(p.gpus, p.gpu): p.plan.fits for p in plan_for(EngineOptions(""), None)}
    assert found == {(1, "H200"): False, (8, "H20"): True, (8, "H100"): True}
    assert plan_for(EngineOptions("", gpu_memory=0.5), "8x96")[0].plan.fits is False
    for text, gpu in (("8xh20", (8, "H20")), ("8 x H100", (8, "H100")), ("1xH200", (1, "H200"))):
        (named,) = plan_for(EngineOptions(""), text)
        assert (named.gpus, named.gpu) == gpu
        assert named.plan.fits == found[gpu]
    (asked,) = plan_for(EngineOptions("", cache_tokens=100_000), "8xH20")
    assert (asked.plan.cache_tokens, asked.plan.fits) == (100_032, True)
    options = EngineOptions("", cache_tokens=50_000_000, max_model_len=32768)
    (much,) = plan_for(options, "8xH20")
    assert much.plan.fits is False
    assert much.plan.advice == (f"cache_tokens = {much.plan.cache_tokens}",)
    (one,) = plan_for(EngineOptions("models/demo"), "1x4")
    assert one.plan.fits
    assert one.to_dict()["cache_tokens"] == one.plan.pages * 64


@pytest.mark.parametrize("text", ["", "8", "x", "8x", "x96", "0x96", "8x0", "8x-1", "axb", "8xnan",
                                  "8xinf", "8xB200", "H100", "8xH100x2"])  # fmt: skip
def test_gpus_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NUMBERxGIB, like 8x96"):
        plan_for(EngineOptions(""), text)


def test_unpacked_weights_are_larger() -> None:
    assert replace(PACKED, experts=0).on_each(1) < PACKED.on_each(1)
    assert weight_bytes(RELEASED, 4).experts > 7 * PACKED.experts
    assert weight_bytes(RELEASED, 4).tables == PACKED.tables


@given(pages=st.integers(0, 20_000), length=st.sampled_from([64, 512, 8192]))
def test_an_engine_takes_no_more_than_the_plan_has(pages: int, length: int) -> None:
    """Also where less than the usual cache fits."""
    model = load_model_config(DEMO)
    options = EngineOptions("demo", device="cuda", max_model_len=length, max_num_seqs=4)
    config, decisions = resolve(options, {}, model, Host(cuda=True, cores=1))
    real = plan_memory(model, config, 80 * GIB, weight_bytes(model, 2))
    plan = replace(real, pages=pages, advice=("more memory",))
    precision = Precision(torch.bfloat16, torch.bfloat16)
    with (
        patch.object(torch.cuda, "mem_get_info", lambda: (80 * GIB, 80 * GIB)),
        patch.object(loading, "plan_memory", lambda *_: plan),
    ):
        if not plan.fits:
            with pytest.raises(ConfigError, match="change: more memory"):
                loading._planned(config, decisions, model, precision)
            return
        planned, told = loading._planned(config, decisions, model, precision)
    assert length <= planned.cache_tokens <= plan.cache_tokens
    assert {d.name: d.value for d in told}["cache_tokens"] == planned.cache_tokens
