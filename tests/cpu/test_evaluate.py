"""Item files of `deepinfer eval`: one line says what is wrong, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.commands.evaluate import (
    calibration_error,
    evaluate,
    is_right,
    load_items,
    score_answers,
)
from deepinfer.config import EngineOptions
from deepinfer.errors import ConfigError

ITEM: dict[str, Any] = {
    "task": "sums", "name": "a", "prompt": "1+1", "answer": "2", "check": "exact", "max_tokens": 3,
}  # fmt: skip


def write(folder: Path, *lines: str) -> Path:
    (folder / "eval.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "is no JSON object"),
        ("{", "not valid JSON"),
        ('{"name": "a"}', "task = None; expected a text"),
        (json.dumps(ITEM | {"prompt": ""}), "prompt = ''; expected a text"),
        (json.dumps(ITEM | {"max_tokens": 0}), "max_tokens = 0; expected a whole number"),
        (json.dumps(ITEM | {"check": "weird"}), "check = 'weird'; expected exact or json"),
        (json.dumps(ITEM | {"check": "json"}), "schema = None; expected an object"),
        ('{"task": "t", "name": "a", "text": ""}', "text = ''; expected a text"),
    ],
)
def test_a_wrong_item_is_named_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, json.dumps(ITEM), line)
    with pytest.raises(ConfigError) as caught:
        load_items(folder)
    assert f"eval.jsonl:2: {message}" in str(caught.value)


def test_line_separators_inside_texts_do_not_end_an_item(tmp_path: Path) -> None:
    item = ITEM | {"answer": "a\u2028b"}
    assert load_items(write(tmp_path, json.dumps(item, ensure_ascii=False), "")) == [item]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"limit": 0}, "limit = 0"),
        ({"limit": -1}, "limit = -1"),
        ({"draft_items": -1}, "items = -1"),
    ],
)
def test_counts_that_make_no_sense(counts: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(EngineOptions(str(write(tmp_path, json.dumps(ITEM)))), (), **counts)  # type: ignore[arg-type]


def test_no_items_and_unknown_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_items(tmp_path)
    with pytest.raises(ConfigError, match="no items"):
        evaluate(EngineOptions(str(write(tmp_path, ""))))
    with pytest.raises(ConfigError, match="task 'facts'; expected one of sums"):
        load_items(write(tmp_path, json.dumps(ITEM)), ["facts"])


def test_answers_are_judged() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    record = ITEM | {"check": "json", "schema": schema, "answer": '{"n":1}'}
    assert is_right(ITEM, " 2\n")
    assert not is_right(ITEM, "22")
    assert is_right(record, '{ "n": 1 }')
    assert not is_right(record, '{"n": 2}')
    assert not is_right(record, '{"n": "1"}')
    assert not is_right(record, "1")
    scores = score_answers([ITEM, ITEM | {"distance": 5}], ["2", "3"])
    assert (scores["sums"].accuracy, scores["sums 5"].wrong) == (1.0, [("a", "2", "3")])


def test_calibration_error_is_the_mean_gap() -> None:
    assert calibration_error([], []) == 0.0
    assert calibration_error([0.95, 0.95, 0.05, 0.05], [True, True, False, False]) == pytest.approx(
        0.05
    )
    assert calibration_error([0.9, 0.9], [False, False]) == pytest.approx(0.9)
