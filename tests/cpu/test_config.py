"""Deciding settings: who is asked first, what is the default, and what is refused."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import (
    Decision,
    EngineConfig,
    EngineOptions,
    Host,
    ModelConfig,
    max_rollback,
    resolve,
)
from deepinfer.errors import ConfigError
from deepinfer.testing.tiny import tiny_config

RELEASED = parse_model_config(RELEASED_CONFIG)
SIZES = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
TINY = parse_model_config(tiny_config(**SIZES))
LAPTOP = Host(cuda=False, cores=3)
SERVER = Host(cuda=True, cores=16)


def decide(
    model: ModelConfig = RELEASED,
    host: Host = LAPTOP,
    environment: dict[str, Any] | None = None,
    **settings: Any,
) -> EngineConfig:
    return resolve(EngineOptions("folder", **settings), environment or {}, model, host)[0]


def refused(
    model: ModelConfig = RELEASED,
    host: Host = LAPTOP,
    environment: dict[str, Any] | None = None,
    **settings: Any,
) -> str:
    with pytest.raises(ConfigError) as caught:
        decide(model, host, environment, **settings)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_defaults_on_a_laptop() -> None:
    assert decide() == EngineConfig(
        model="folder", tokenizer="folder", device="cpu", dtype="bfloat16", act_quant=True,
        max_model_len=32768, max_num_seqs=32, max_num_batched_tokens=512, cache_tokens=32768,
        page_tokens=64, threads=3, yoco_prefill="off", yoco_keep_tokens=0,
        ops_backend="auto", op=(), ops_strict=False, sparse_mla_backend="auto", kernels="auto",
        batch_invariant=False, simulate_no_tilelang=False, prefix_checkpoints=64,
        max_queue=4096, overlap=False, enforce_eager=True, sync_guard=False,
        gpu_memory=0.9, log_interval=0.0, flaggems="off", flaggems_allowlist="",
    )  # fmt: skip


def test_defaults_on_a_gpu() -> None:
    expected = dataclasses.replace(
        decide(), device="cuda", max_num_batched_tokens=2048, threads=16, overlap=True,
        enforce_eager=False, sync_guard=True,
    )  # fmt: skip
    assert decide(host=SERVER) == expected
    assert decide(host=SERVER, device="cpu").max_num_batched_tokens == 512


def test_a_short_model_has_a_short_context() -> None:
    assert decide(TINY).max_model_len == 1024
    assert decide(TINY).cache_tokens == 32768


def test_the_cache_grows_with_the_context() -> None:
    assert decide(max_model_len=100_000).cache_tokens == 100_000
    assert decide(max_model_len=100).cache_tokens == 32768


@given(
    st.lists(st.sampled_from([1, 2]), max_size=4),
    st.one_of(st.none(), st.integers(1, 100)),
)
def test_default_pages_hold_whole_groups_and_blocks(ratios: list[int], block: int | None) -> None:
    model = dataclasses.replace(
        RELEASED, compress_ratios=(*ratios, *[0] * 43), kv_source_layer_ids=range(len(ratios)),
        candidate_source_layer_id=None if block is None else 0, candidate_block_size=block or 7,
    )  # fmt: skip
    page = decide(model).page_tokens
    assert page >= 64
    for ratio in ratios:
        assert page % ratio == 0
        assert page // ratio % (block or 1) == 0
    least = 2 * (block or 1) if ratios else 1
    assert page < 64 + least


def test_truncated_prefill_keeps_window_and_rollback() -> None:
    for mode in ("mask", "compact"):
        assert decide(yoco_prefill=mode).yoco_keep_tokens == 128 + 6
        assert decide(yoco_prefill=mode, yoco_keep_tokens=140).yoco_keep_tokens == 140
    undrafted = dataclasses.replace(RELEASED, num_nextn_predict_layers=0)
    assert decide(undrafted, yoco_prefill="mask").yoco_keep_tokens == 128 + 1
    assert (max_rollback(RELEASED), max_rollback(undrafted)) == (6, 1)


def test_auto_takes_the_gpu_when_there_is_one() -> None:
    assert decide(device="auto").device == "cpu"
    assert decide(host=SERVER, device="auto").device == "cuda"
    _, decisions = resolve(EngineOptions("m", device="auto"), {}, RELEASED, SERVER)
    assert Decision("device", "cuda", "default") in decisions


# One value that differs from the default, for every setting.
OTHER = {
    "tokenizer": "elsewhere", "device": "cuda", "dtype": "float32", "act_quant": False,
    "max_model_len": 5000, "max_num_seqs": 7, "max_num_batched_tokens": 999,
    "cache_tokens": 50_000, "page_tokens": 128, "threads": 9, "yoco_prefill": "mask",
    "yoco_keep_tokens": 200, "ops_backend": "ref", "op": ("rope=ref",), "ops_strict": True,
    "sparse_mla_backend": "triton", "kernels": "tile", "batch_invariant": True,
    "simulate_no_tilelang": True, "prefix_checkpoints": 5, "max_queue": 9, "overlap": False,
    "enforce_eager": True, "sync_guard": False, "gpu_memory": 0.5, "log_interval": 2.5,
    "flaggems": "right", "flaggems_allowlist": "list.json",
}  # fmt: skip
TOGETHER = sorted(set(OTHER) - {"prefix_checkpoints"})  # which yoco_prefill forbids


def test_every_setting_has_another_value_here() -> None:
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    assert set(OTHER) == fields - {"model", "_"}
    assert fields - {"_"} == {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("source", ["user", "environment", "both"])
def test_user_before_environment_before_default(name: str, source: str) -> None:
    base = {
        "yoco_keep_tokens": {"yoco_prefill": "compact"}, "flaggems_allowlist": {"flaggems": "fast"},
    }.get(name, {})  # fmt: skip
    environment = dict(base)
    settings: dict[str, Any] = {}
    if source != "environment":
        settings[name] = OTHER[name]
    if source == "environment":
        environment[name] = OTHER[name]
    elif source == "both":
        environment[name] = getattr(decide(host=SERVER, environment=base), name)
    options = EngineOptions("folder", **settings)
    config, decisions = resolve(options, environment, RELEASED, SERVER)
    assert getattr(config, name) == OTHER[name]
    decided = {decision.name: decision for decision in decisions}
    assert decided[name].value == OTHER[name]
    assert decided[name].decided_by == ("environment" if source == "environment" else "user")


@given(st.sets(st.sampled_from(TOGETHER)), st.sets(st.sampled_from(TOGETHER)))
def test_every_decision_is_reported_with_its_origin(user: set[str], environment: set[str]) -> None:
    user |= {"yoco_prefill", "flaggems"}  # which allow yoco_keep_tokens and flaggems_allowlist
    options = EngineOptions("folder", **{name: OTHER[name] for name in user})
    config, decisions = resolve(
        options, {name: OTHER[name] for name in environment}, RELEASED, SERVER
    )
    assert [decision.name for decision in decisions] == [
        field.name for field in dataclasses.fields(EngineConfig)
    ]
    for name, value, origin in map(dataclasses.astuple, decisions):
        assert getattr(config, name) == value
        if name in user or name == "model":
            assert origin == "user"
        else:
            assert origin == ("environment" if name in environment else "default")
        if name == "op":  # sparse_mla_backend is one of its entries
            value = tuple(entry for entry in value if not entry.startswith("sparse_attention="))
        if name in user | environment:
            assert value == OTHER[name]


def test_false_and_off_are_a_users_word() -> None:
    _, decisions = resolve(
        EngineOptions("m", act_quant=False, yoco_prefill="off"), {"yoco_prefill": "mask"},
        RELEASED, LAPTOP,
    )  # fmt: skip
    assert Decision("act_quant", False, "user") in decisions
    assert Decision("yoco_prefill", "off", "user") in decisions


def test_operators_of_both_are_joined_with_the_users_word_first() -> None:
    environment = {"op": ("rope=triton", "rms_norm=triton")}
    config = decide(environment=environment, op=("rms_norm=ref", "mixes=ref", "mixes=triton"))
    assert config.op == ("rope=triton", "rms_norm=ref", "mixes=triton")


@pytest.mark.parametrize("entry", ["rope", "rope=", "=ref", ""])
def test_a_malformed_operator_entry_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match="OPERATOR=BACKEND, like rms_norm=triton"):
        decide(op=(entry,))


WHOLE = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_tokens", "page_tokens",
         "threads"]  # fmt: skip


@pytest.mark.parametrize("name", [*WHOLE, "yoco_keep_tokens"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "64", [64]])
def test_numbers_are_whole_and_positive(name: str, value: object) -> None:
    for message in (refused(**{name: value}), refused(environment={name: value})):
        assert message.startswith(f"{name} = {value!r}; expected a whole number of at least ")


@pytest.mark.parametrize("name", WHOLE)
def test_zero_is_no_number_of_anything(name: str) -> None:
    assert refused(**{name: 0}) == f"{name} = 0; expected a whole number of at least 1"


@pytest.mark.parametrize(("settings", "expected"), [
    ({"dtype": "float16"}, "dtype = 'float16'; expected one of bfloat16, float32, float64"),
    ({"dtype": 32}, "dtype = 32; expected one of bfloat16"),
    ({"device": "tpu"}, "device = 'tpu'; expected one of cpu, cuda"),
    ({"yoco_prefill": "on"}, "yoco_prefill = 'on'; expected one of off, mask, compact"),
    ({"yoco_prefill": ["mask"]}, "yoco_prefill = ['mask']; expected one of off, mask, compact"),
    ({"device": "cuda"}, "device = 'cuda'; expected a machine with a CUDA GPU"),
    ({"act_quant": "no"}, "act_quant = 'no'; expected true or false"),
    ({"act_quant": 0}, "act_quant = 0; expected true or false"),
    ({"max_num_seqs": 100, "max_num_batched_tokens": 99},
     "max_num_batched_tokens = 99; expected at least max_num_seqs = 100"),
    ({"max_model_len": 1048577},
     "max_model_len = 1048577; expected at most max_position_embeddings = 1048576"),
    ({"cache_tokens": 100, "max_model_len": 101},
     "cache_tokens = 100; expected at least max_model_len = 101"),
    ({"yoco_keep_tokens": 140}, "yoco_keep_tokens = 140; expected yoco_prefill mask or compact"),
    ({"yoco_keep_tokens": 140, "yoco_prefill": "off"}, "expected yoco_prefill mask or compact"),
    ({"yoco_keep_tokens": 133, "yoco_prefill": "mask"},
     "yoco_keep_tokens = 133; expected at least window and rollback, 134"),
    ({"yoco_keep_tokens": 0, "yoco_prefill": "mask"}, "at least window and rollback, 134"),
])  # fmt: skip
def test_refused_settings(settings: dict[str, Any], expected: str) -> None:
    assert expected in refused(**settings)
    assert expected in refused(environment=settings)


def test_limits_are_inclusive() -> None:
    decide(max_num_seqs=100, max_num_batched_tokens=100)
    decide(max_model_len=1048576)
    decide(cache_tokens=100, max_model_len=100)
    decide(yoco_keep_tokens=134, yoco_prefill="mask")


def test_truncated_prefill_needs_a_boundary_that_cuts_nothing_off() -> None:
    flat = dataclasses.replace(RELEASED, compress_ratios=(0, 0, *[2] * 38, 0, 0, 0))
    assert "off: no layer has compress ratio 1" in refused(flat, yoco_prefill="mask")
    late = dataclasses.replace(RELEASED, engram_layer_ids=(1, 20))
    assert "off: layers [20] need every row" in refused(late, yoco_prefill="compact")
    early = dataclasses.replace(RELEASED, dspark_target_layer_ids=(19, 38))
    assert "off: layers [19] need every row" in refused(early, yoco_prefill="mask")
    second = dataclasses.replace(RELEASED, kv_source_layer_ids=(2, 8, 14, 20, 30))
    assert "off: layers [30] need every row" in refused(second, yoco_prefill="mask")
    undrafted = dataclasses.replace(early, num_nextn_predict_layers=0)
    assert decide(undrafted, yoco_prefill="mask").yoco_prefill == "mask"
    edge = dataclasses.replace(RELEASED, engram_layer_ids=(1, 19), dspark_target_layer_ids=(20, 39))
    assert decide(edge, yoco_prefill="mask").yoco_prefill == "mask"
    for model in (flat, late, early):
        assert decide(model).yoco_prefill == "off"


@given(st.dictionaries(st.sampled_from(sorted(OTHER)), st.one_of(
    st.integers(-2, 200), st.booleans(), st.text(max_size=3), st.none(), st.floats(),
    st.sampled_from(["cpu", "auto", "mask", "off", "float64"]),
), max_size=4))  # fmt: skip
def test_any_value_is_accepted_or_refused_in_words(settings: dict[str, Any]) -> None:
    message = ""
    try:
        resolve(EngineOptions("folder", **settings), {}, RELEASED, LAPTOP)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()


def test_defaults_fit_what_is_given(released: ModelConfig) -> None:
    """A setting alone is never refused because of another one's default."""

    def config(**given: int) -> EngineConfig:
        options = EngineOptions("m", **given)  # type: ignore[arg-type]
        return resolve(options, {}, released, Host(cuda=False, cores=2))[0]

    assert config(max_num_seqs=1024).max_num_batched_tokens == 1024
    assert config(max_num_batched_tokens=8).max_num_seqs == 8
    assert config(cache_tokens=4096).max_model_len == 4096
    assert config(max_model_len=100_000).cache_tokens == 100_000


def test_a_gpu_has_graphs_an_overlapped_loop_and_a_guard() -> None:
    config = decide(host=SERVER)
    assert (config.overlap, config.enforce_eager, config.sync_guard) == (True, False, True)
    for setting in ("overlap", "enforce_eager", "sync_guard"):
        assert getattr(decide(host=SERVER, **{setting: False}), setting) is False
    assert decide(host=SERVER, environment={"enforce_eager": True}).enforce_eager


def test_states_of_prefixes() -> None:
    assert decide(max_num_seqs=7).prefix_checkpoints == 14
    assert decide(max_num_seqs=7).state_slots == 21
    assert decide(prefix_checkpoints=0).state_slots == 32
    assert decide(prefix_checkpoints=3).state_slots == 35
    truncated = decide(yoco_prefill="mask", host=SERVER)
    assert (truncated.prefix_caching, truncated.enforce_eager) == (False, True)


@pytest.mark.parametrize(("settings", "named"), [
    ({"prefix_checkpoints": -1}, "prefix_checkpoints = -1; expected a whole number"),
    ({"yoco_prefill": "mask", "prefix_checkpoints": 2}, "prefix_checkpoints = 2; expected 0 with"),
    ({"enforce_eager": False}, "enforce_eager = False; expected true on a CPU"),
    ({"sync_guard": True}, "sync_guard = True; expected false on a CPU"),
    ({"gpu_memory": 0.0}, "gpu_memory = 0.0; expected a number in"),
    ({"gpu_memory": 0.5}, "gpu_memory = 0.5; expected a GPU"),
    ({"gpu_memory": 1.5}, "gpu_memory = 1.5; expected a number in"),
    ({"gpu_memory": "all"}, "gpu_memory = 'all'; expected a number in"),
    ({"log_interval": -1}, "log_interval = -1; expected a number of seconds"),
    ({"log_interval": float("nan")}, "log_interval = nan; expected a number of seconds"),
    ({"max_queue": 0}, "max_queue = 0; expected a whole number"),
    ({"overlap": 1}, "overlap = 1; expected true or false"),
])  # fmt: skip
def test_settings_of_the_engine_that_cannot_be(settings: dict[str, Any], named: str) -> None:
    assert named in refused(**settings)


def test_no_graphs_with_a_truncated_prefill() -> None:
    text = refused(host=SERVER, yoco_prefill="compact", enforce_eager=False)
    assert "enforce_eager = False; expected true with yoco_prefill" in text


def test_flaggems_is_for_gpus_and_its_list_for_flaggems() -> None:
    assert decide(host=SERVER, flaggems="fast").flaggems == "fast"
    assert refused(flaggems="fast") == (
        "flaggems = 'fast'; expected off on a CPU: FlagGems has kernels for GPUs only"
    )
    assert refused(host=SERVER, flaggems_allowlist="x") == (
        "flaggems_allowlist = 'x'; expected flaggems fast or right"
    )
    assert "expected one of off, fast, right" in refused(host=SERVER, flaggems="all")
    assert "expected the name of a file" in refused(host=SERVER, flaggems_allowlist=3)
