"""DEEPINFER_* variables: legal values, one clear error for others, and no variable unknown."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config import EngineOptions
from deepinfer.env import PREFIX, VARIABLES, read_environment
from deepinfer.errors import ConfigError

MODE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
KEEP = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"


def test_an_environment_without_ours_decides_nothing() -> None:
    assert read_environment({}) == {}
    assert read_environment({"PATH": "x", "deepinfer_yoco": "1", "MY_DEEPINFER_X": "1"}) == {}


@pytest.mark.parametrize(("name", "text", "setting", "value"), [
    (MODE, "off", "yoco_prefill", "off"), (MODE, "mask", "yoco_prefill", "mask"),
    (MODE, "compact", "yoco_prefill", "compact"), (KEEP, "0", "yoco_keep_tokens", 0),
    (KEEP, "140", "yoco_keep_tokens", 140), (KEEP, "007", "yoco_keep_tokens", 7),
    ("DEEPINFER_OPS_BACKEND", "triton", "ops_backend", "triton"),
    ("DEEPINFER_OPS_STRICT", "1", "ops_strict", True),
    ("DEEPINFER_BATCH_INVARIANT", "0", "batch_invariant", False),
    ("DEEPINFER_KERNELS", "tile", "kernels", "tile"),
    ("DEEPINFER_SPARSE_MLA_BACKEND", "ref", "sparse_mla_backend", "ref"),
    ("DEEPINFER_SIMULATE_NO_TILELANG", "1", "simulate_no_tilelang", True),
    ("DEEPINFER_ENABLE_FLAGGEMS", "1", "flaggems", "fast"),
    ("DEEPINFER_ENABLE_FLAGGEMS", "0", "flaggems", "off"),
    ("DEEPINFER_ENABLE_FLAGGEMS", "right", "flaggems", "right"),
    ("DEEPINFER_OPS_RMS_NORM", "triton", "op", ("rms_norm=triton",)),
    ("DEEPINFER_ENFORCE_EAGER", "1", "enforce_eager", True),
    ("DEEPINFER_DISABLE_SYNC_GUARD", "1", "sync_guard", False),
    ("DEEPINFER_DISABLE_SYNC_GUARD", "0", "sync_guard", True),
])  # fmt: skip
def test_legal_values(name: str, text: str, setting: str, value: object) -> None:
    assert read_environment({name: text, "HOME": "x"}) == {setting: value}


@pytest.mark.parametrize(("name", "near"), [
    ("DEEPINFER_OPS_STRCT", "DEEPINFER_OPS_STRICT"), ("DEEPINFER_OPS_", "DEEPINFER_OPS_STRICT"),
    ("DEEPINFER_OPS_BACKENDS", "DEEPINFER_OPS_BACKEND"), ("DEEPINFER_OPS_rope", "DEEPINFER_"),
])  # fmt: skip
def test_slips_of_variables_are_no_operators(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is unknown; did you mean {near}"):
        read_environment({name: "1"})
    assert read_environment({"DEEPINFER_OPS_ROPE": ""}) == {}


def test_operators_one_by_one() -> None:
    found = read_environment({"DEEPINFER_OPS_ROPE": "ref", "DEEPINFER_OPS_RMS_NORM": "triton"})
    assert found == {"op": ("rope=ref", "rms_norm=triton")}
    with pytest.raises(ConfigError, match="DEEPINFER_OPS_ROPE = 'a b'; expected a backend"):
        read_environment({"DEEPINFER_OPS_ROPE": "a b"})


def test_several_at_once() -> None:
    found = read_environment({MODE: "compact", KEEP: "200"})
    assert found == {"yoco_prefill": "compact", "yoco_keep_tokens": 200}


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
def test_empty_counts_as_not_set(name: str) -> None:
    assert read_environment({name: ""}) == {}


@pytest.mark.parametrize(("name", "text"), [
    *((MODE, text) for text in ("on", "Mask", " mask", "mask,compact", "1")),
    *((KEEP, text) for text in ("-1", "1.5", "many", " 7", "7 ", "0x10", "1_000", "+5", "\u0663",
                                "\u00b2", "9" * 5000)),
])  # fmt: skip
def test_malformed_values_are_named_with_what_is_legal(name: str, text: str) -> None:
    expected = {MODE: "off, mask or compact", KEEP: "a whole number"}[name]
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    assert str(caught.value) == f"{name} = {text!r}; expected {expected}"


@pytest.mark.parametrize(("name", "near"), [
    ("DEEPINFER_YOCO_PREFILL_MODE", MODE),
    ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MOD", MODE),
    ("DEEPINFER_YOCO_PREFILL_KEEP_TOKEN", KEEP),
    ("DEEPINFER_KEEP_TOKENS", KEEP),
    ("DEEPINFER_yoco_prefill_keep_tokens", KEEP),
])  # fmt: skip
@pytest.mark.parametrize("text", ["", "140"])
def test_unknown_names_get_the_nearest_known_one(name: str, near: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    assert str(caught.value) == f"environment variable {name} is unknown; did you mean {near}?"


@given(st.text(max_size=20), st.text(max_size=5))
def test_any_other_name_is_refused_in_words(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; did you mean DEEPINFER_"):
        read_environment({PREFIX + "X" + name: text})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE, raising=False)
    monkeypatch.setenv(KEEP, "150")
    assert read_environment() == {"yoco_keep_tokens": 150}
    monkeypatch.setenv("DEEPINFER_TYPO", "1")
    with pytest.raises(ConfigError, match="DEEPINFER_TYPO is unknown"):
        read_environment()


def test_every_variable_stands_for_a_setting_of_its_own() -> None:
    settings = [variable.setting for variable in VARIABLES]
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    assert len(set(settings)) == len(settings)
    assert set(settings) <= fields
    for variable in VARIABLES:
        assert variable.name.startswith(PREFIX)
        assert variable.name.isupper()
        assert variable.meaning
        assert variable.expected
