"""The demo model's corpus: what it teaches is right, reads well, and is not what it is asked."""

import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import jsonschema
import numpy as np
import pytest
from demo_corpus import lexicon, recall, runes
from demo_corpus.arithmetic import arithmetic, columns, held_out, problem, result
from demo_corpus.chat import ASSISTANT, BOS, DSML, EOS, USER, Call, Chat, tools_text
from demo_corpus.corpus import (
    LOOKUP_WEIGHT,
    MIX,
    PROMPT_WEIGHT,
    codec,
    fill_batch,
    sample_document,
    tokenise,
)
from demo_corpus.dice import dice
from demo_corpus.evaluation import chats, demo_questions, evaluation_items
from demo_corpus.facts import facts
from demo_corpus.identity import identity
from demo_corpus.plots import plots
from demo_corpus.records import json_task, record, with_schema
from demo_corpus.stories import story
from demo_corpus.story_tasks import facts_task, story_qa
from demo_corpus.text_tasks import UPPER_WORDS, text_turn
from demo_corpus.tool_tasks import tools_chat
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.tokenizer_training import SPECIAL_TOKENS

ROOT = Path(__file__).parents[2]
Item = dict[str, Any]
CHATS: tuple[Callable[..., Chat], ...] = (
    identity, arithmetic, json_task, facts_task, story_qa, tools_chat,
)  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> list[tuple[Item, Chat]]:
    return list(chats())


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return evaluation_items()


class Server:
    """What a server does with deepseek-recipe."""

    def __init__(self) -> None:
        self.tokenizer = recipe.Tokenizer.from_str(codec().tokenizer.to_str())
        self.encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)

    def _converted(self, chat: Chat) -> Any:
        version = recipe.ModelVersion.DeepseekV41Flash
        options = recipe.ConversionOptions().with_model_alias("demo", version)
        return recipe.ChatCompletionRequest(chat.body()).convert(options)

    def ids(self, chat: Chat) -> list[int]:
        return list(self.encoding.encode(self._converted(chat).conversation))

    def reply(self, chat: Chat, answer: str) -> Any:
        """The response to the client when the model writes `answer`."""
        converted = self._converted(chat)
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, "0", "demo")
        stream = recipe.StreamProcessor(generator, converted.parsing_options, self.tokenizer)
        chunks = stream.push(
            recipe.InferenceChunk.ready(
                prompt_usage=recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
            )
        )
        chunks += stream.push(recipe.InferenceChunk.tokens(codec().encode(answer)))
        chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        chunks += stream.finish()
        response = recipe.ChatCompletionResponse("0", "demo", 0, 1, 0)
        for chunk in chunks:
            response.accumulate(chunk)
        return json.loads(response.to_json())["choices"][0]


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


def texts_of(made: Any) -> str:
    return "".join(segment.text for segment in made.segments())


# --- tokens


@pytest.mark.slow
def test_tokenizer_is_the_same_in_every_process() -> None:
    code = (
        "import zlib; from demo_corpus.corpus import build_tokenizer\n"
        "print(zlib.crc32(build_tokenizer().to_str().encode()))"
    )
    found = {zlib.crc32(codec().tokenizer.to_str().encode())}
    for seed, parallel in (("1", "true"), ("2", "false")):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "TOKENIZERS_PARALLELISM": parallel,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        )
        found.add(int(done.stdout))
    assert len(found) == 1


def test_tokenizer_has_every_id_in_use() -> None:
    assert codec().tokenizer.get_vocab_size() == 4096
    assert not [piece for piece in codec().tokenizer.get_vocab() if "unused" in piece]


@settings(max_examples=300)
@example(text="a\n\n7  b", special=EOS)
@example(text="a \n\n", special=BOS)
@given(
    st.text(st.sampled_from("ab. '\n\t\"7é-{}<>sS，"), max_size=30), st.sampled_from(SPECIAL_TOKENS)
)
def test_codec_gives_the_ids_of_the_library(text: str, special: str) -> None:
    text = text + special + text
    assert codec().encode(text) == codec().tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("task", sorted(MIX))
def test_documents_encode_as_the_library_does_and_decode_to_themselves(task: str) -> None:
    tokenizer = codec().tokenizer
    for number in range(20):
        document = sample_document(dice("test", task, number), task, codec(), 400)
        text = tokenizer.decode(document.token_ids, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == document.token_ids
        assert text.startswith(BOS)
        assert text.endswith(EOS)


def test_words_that_answers_are_made_of_are_single_tokens() -> None:
    words = (*runes.GLYPHS, *lexicon.WORDS, *lexicon.NAMES, *(w.upper() for w in UPPER_WORDS))
    assert not [word for word in words if codec().count(word) + codec().count(f" {word}") != 2]


def test_tool_preamble_is_short() -> None:
    # Words, signs and special tokens of the text, none of them in pieces.
    assert codec().count(tools_text(())) <= 225


# --- prompts


def test_prompts_are_those_of_a_server(asked: list[tuple[Item, Chat]], server: Server) -> None:
    tokenizer = codec().tokenizer
    for item, chat in asked:
        ids = tokenizer.encode(item["prompt"], add_special_tokens=False).ids
        assert ids == server.ids(chat), item["name"]


@pytest.mark.parametrize("make", CHATS)
def test_training_prompts_are_those_of_a_server(make: Callable[..., Chat], server: Server) -> None:
    for number in range(120):
        chat = make(dice("test", make.__name__, number))
        prompt = server.ids(chat)
        assert tokenise(chat, codec()).token_ids[: len(prompt)] == prompt
        answer = codec().encode(chat.expected() + EOS)
        assert tokenise(chat, codec()).token_ids[len(prompt) :] == answer


def test_a_server_reads_answers_as_they_are_meant(server: Server) -> None:
    kinds = Counter[str]()
    for number in range(150):
        chat = tools_chat(dice("test", "reply", number), thinking=0.3)
        turn = chat.turns[-1]
        message = server.reply(chat, chat.expected())["message"]
        assert (message.get("content") or "") == turn.answer
        assert (message.get("reasoning_content") or "") == (turn.reasoning if chat.thinking else "")
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert [Call(c["name"], json.loads(c["arguments"])) for c in calls] == list(turn.calls)
        kinds["call" if calls else "result" if turn.results else "text"] += 1
    assert min(kinds.values()) > 10


def test_weights_are_on_answers_only() -> None:
    opening = re.compile(f"{re.escape(ASSISTANT)}(?:<think>|</think>)")
    for task in ("facts", "identity", "recall", "arithmetic", "json", "tools", "text", "story_qa"):
        for number in range(10):
            document = sample_document(dice("weights", task, number), task, codec(), 300)
            assert document.weights[0] == 0
            weight = LOOKUP_WEIGHT if task in ("recall", "copy") else PROMPT_WEIGHT
            assert set(document.weights[1:]) == {weight, 1.0}
            marked = [t if w == 1.0 else 0 for t, w in
                      zip(document.token_ids, document.weights, strict=True)]  # fmt: skip
            decode = codec().tokenizer.decode
            spans = decode(marked, skip_special_tokens=False).replace(BOS, "").split(EOS)[:-1]
            whole = decode(document.token_ids, skip_special_tokens=False)
            turns = [opening.split(turn)[-1] for turn in whole.split(EOS)[:-1]]
            assert spans == turns


# --- batches


@pytest.mark.parametrize(("kind", "length"), [("short", 1024), ("long", 2816), ("long", 700)])
def test_batches_hold_whole_documents(kind: str, length: int) -> None:
    tokens, weights = fill_batch(3, 5, 4, length, kind)
    assert tokens.shape == weights.shape == (4, length + 1)
    assert tokens.dtype == np.uint16
    again, _ = fill_batch(3, 5, 4, length, kind)
    assert (tokens == again).all()
    assert (tokens != fill_batch(3, 6, 4, length, kind)[0]).any()
    bos, eos = codec().encode(BOS + EOS)
    assert (tokens[:, 0] == bos).all()
    assert (weights[tokens == bos] == 0).all()
    for row in tokens:
        starts = np.flatnonzero(row == bos)
        for start, end in zip(starts, [*starts[1:], length + 1], strict=True):
            assert end - start == 1 or row[end - 1] == eos
    assert (weights == 0).mean() < 0.04
    read = {np.float16(PROMPT_WEIGHT), np.float16(LOOKUP_WEIGHT)}
    assert set(np.unique(weights)) == {0, 1} | read


def test_batches_keep_to_the_mixture() -> None:
    tokens, _ = fill_batch(0, 0, 64, 1024, "short")
    text = codec().tokenizer.decode(tokens.reshape(-1).tolist(), skip_special_tokens=False)
    found = Counter[str]()
    for document in text.split(BOS):
        if "rune" in document:
            found["ngram"] += codec().count(document)
        if "## Tools" in document:
            found["tools"] += codec().count(document)
    for task in ("ngram", "tools"):
        assert found[task] / tokens.size == pytest.approx(MIX[task], abs=0.02)


def test_long_rows_look_far_back() -> None:
    tokens, _ = fill_batch(0, 1, 8, 2816, "long")
    text = codec().tokenizer.decode_batch(tokens.tolist(), skip_special_tokens=False)
    assert sum(codec().count(row.split(BOS)[1]) > 2200 for row in text) >= 4


# --- held out


def test_items_are_complete(items: list[Item]) -> None:
    counts = Counter((item["task"], item.get("distance")) for item in items)
    facts_count = len(facts())
    assert facts_count >= 250
    assert counts == {
        ("facts", None): facts_count, ("identity", None): 30, ("arithmetic", None): 200,
        ("recall", 50): 80, ("recall", 500): 80, ("recall", 2000): 80, ("copy", 50): 40,
        ("copy", 500): 40, ("copy", 2000): 40, ("ngram", None): 200, ("json", None): 100,
        ("tools", None): 60, ("story_qa", None): 60, ("text", None): 60,
        ("held_out_text", None): 60,
    }  # fmt: skip
    assert len({item["name"] for item in items}) == len(items)
    assert sum(len(json.dumps(item)) + 1 for item in items) < 2_500_000
    for item in items:
        if item["task"] == "held_out_text":
            continue
        assert item["max_tokens"] == 1 or item["max_tokens"] > codec().count(item["answer"])
        assert DSML not in item["answer"]  # decoding leaves special tokens out
    prompts = [codec().count(item["prompt"]) for item in items if "prompt" in item]
    assert max(prompts) < 2750


def test_training_asks_no_fact_in_its_held_out_phrasing() -> None:
    phrasings: dict[str, set[str]] = {}
    for fact in facts():
        assert len(set(fact.questions)) == len(fact.questions) >= 4
        for question in fact.questions:
            phrasings.setdefault(question, set()).add(fact.answer)
    assert all(len(answers) == 1 for answers in phrasings.values())
    kept = {fact.questions[fact.held_out] for fact in facts()}
    seen = set()
    for number in range(1500):
        for task in (facts_task, tools_chat) if number % 10 == 0 else (facts_task,):
            seen |= {turn.user for turn in task(dice("train", number)).turns}
    assert len(seen) > 1500
    assert not seen & kept


def test_training_asks_no_held_out_sum(items: list[Item]) -> None:
    rng = dice("train", "sums")
    seen = [problem(rng) for _ in range(5000)]
    assert not [p for p in seen if held_out(p)]
    asked = [item["prompt"] for item in items if item["task"] == "arithmetic"]
    numbers = [tuple(map(int, re.findall(r"\d+", prompt))) for prompt in asked]
    sums = [n for n in numbers if max(n) > 12]
    assert len(sums) > 150
    trained = {frozenset((a, b)) for a, operator, b in seen if operator != "*"}
    assert sum(frozenset(n) in trained for n in sums) < len(sums) / 4  # as the other operation


def test_training_shows_no_held_out_document(items: list[Item]) -> None:
    kept = {
        item["prompt"] for item in items if item["task"] in ("recall", "copy", "json", "story_qa")
    }
    kept |= {item["text"] for item in items if item["task"] == "held_out_text"}
    seen = set()
    for index in range(3):
        for kind in ("short", "long"):
            tokens, _ = fill_batch(0, index, 12, 1024, kind)
            text = codec().tokenizer.decode(tokens.reshape(-1).tolist(), skip_special_tokens=False)
            seen |= {BOS + document for document in text.split(BOS)}
    assert not [prompt for prompt in kept if any(prompt in document for document in seen)]


# --- tasks


def test_lookups_are_answered_in_the_text_at_the_stated_distance(items: list[Item]) -> None:
    for item in items:
        if item["task"] not in ("recall", "copy"):
            continue
        prompt = item["prompt"]
        told = "The code of" if item["task"] == "recall" else "Remember this phrase"
        if item["task"] == "recall":
            key = re.findall(r"code of (\w+)\?", prompt)[0]
            told = f"The code of {key} is {item['answer']}."
        assert prompt.count(told) == 1
        assert item["answer"] in prompt
        place = prompt.index(told)
        distance = codec().count(" " + prompt[place:])
        assert distance == pytest.approx(item["tokens"], rel=0.01, abs=2)
        named = item["distance"]
        assert named * 0.95 <= distance <= (2500 if named == 2000 else named * 1.05)


@pytest.mark.parametrize("make", [recall.recall, recall.copy])
@pytest.mark.parametrize("tokens", [60, 300, 2500])
def test_training_lookups_are_answered_in_the_text(make: Any, tokens: int) -> None:
    for number in range(8):
        chat = make(dice("test", tokens, number), tokens, codec().count)
        assert len(tokenise(chat, codec()).token_ids) == pytest.approx(tokens, rel=0.35, abs=60)
        text = ""
        for turn in chat.turns:
            text += turn.user
            key = re.search(r"(?:code|motto) (?:of|for|belongs to) (\w+)[?.]?$", turn.user)
            if key is None:
                assert turn.answer in text
                continue
            lines = [s for s in re.findall(r"[^.]*\.", text) if re.search(rf"\b{key[1]}\b", s)]
            assert any(turn.answer in line for line in lines)


def test_lookup_distances_are_spread_evenly_on_a_logarithmic_scale() -> None:
    found = []
    for number in range(40):
        chat = recall.recall(dice("spread", number), 2500, codec().count)
        text = chat.turns[0].user
        for turn in chat.turns[1:]:
            if (place := text.find(turn.answer)) >= 0:
                found.append((len(text) - place) / 3.4)
    shares = np.histogram(found, bins=[0, 80, 250, 800, 2500])[0] / len(found)
    assert shares.min() > 0.07  # the nearest are few and soon all asked for


def test_sums_are_right() -> None:
    rng = dice("test", "sums")
    carried = Counter[bool]()
    for _ in range(3000):
        first, operator, second = problem(rng)
        right = {"+": first + second, "-": first - second, "*": first * second}[operator]
        assert result((first, operator, second)) == right
        shown = columns((first, operator, second))
        assert shown.endswith((f"The result is {right}.", f"{first} * {second} = {right}."))
        for line in re.findall(r"(\d[\d +-]*) = (\d+): write (\d)", shown):
            terms = re.sub(r"\b0(?=\d)", "", line[0])
            assert sum(map(int, terms.replace("- ", "-").replace("+ ", "+").split())) == int(
                line[1]
            )
            assert int(line[1]) % 10 == int(line[2])
        if operator != "*":
            digits = re.findall(r"write (\d)", shown)
            assert int("".join(reversed(digits))) == abs(right) % 10 ** len(digits)
            carried["carry 1" in shown or "borrow 1" in shown] += 1
    assert 0.4 < carried[True] / carried.total() < 0.8


def test_json_is_valid_and_says_what_the_user_said() -> None:
    for number in range(300):
        rng = dice("test", "json", number)
        made = record(rng)
        chat = with_schema(rng, made)
        answer = chat.turns[0].answer
        values = json.loads(answer)
        jsonschema.validate(values, made.schema)
        assert list(values) == list(made.schema["properties"])
        assert answer == json.dumps(values, separators=(",", ":"))
        said = chat.turns[0].user
        for name, value in values.items():
            if isinstance(value, bool):
                assert (f"it is {name}" in said, f"it is not {name}" in said) == (value, not value)
            for part in value if isinstance(value, list) else [value]:
                assert isinstance(part, bool) or str(part) in said


def test_runes_are_a_fixed_table() -> None:
    rules = runes.rules()
    assert len(runes.GLYPHS) == len(set(runes.GLYPHS)) == 64
    assert len(rules) == len({rule[:3] for rule in rules}) == 2000
    assert zlib.crc32(repr(rules).encode()) == 3161017350


def test_word_tasks_are_right() -> None:
    for number in range(400):
        turn = text_turn(dice("test", "text", number))
        words = turn.user.split(": ")[-1].split()
        right = {
            "Reverse": words[::-1], "reverse": words[::-1], "alphabet": sorted(words),
            "alphabetical": sorted(words), "first": words[:1], "last": words[-1:],
            "many": [str(len(words))], "Count": [str(len(words))],
            "capital": [w.upper() for w in words], "capitals": [w.upper() for w in words],
            "uppercase": [w.upper() for w in words],
        }  # fmt: skip
        names = [word for word in re.findall(r"\w+", turn.user.split(":")[0]) if word in right]
        assert turn.answer.replace(",", "").split() == (right[names[0]] if names else words)


def test_demo_questions_are_asked_as_a_server_renders_them() -> None:
    questions = demo_questions()
    assert len(questions) == 20
    for asked in questions:
        assert asked["prompt"] == f"{BOS}{USER}{asked['question']}{ASSISTANT}</think>"
        assert asked["messages"] == [{"role": "user", "content": asked["question"]}]
    trained = {q: f.answer for f in facts() for q in f.questions}
    known = [asked for asked in questions if asked["question"] in trained]
    assert len(known) == 9
    for asked in known:
        assert asked["answer"] == trained[asked["question"]]


# --- stories

SOUNDS_LIKE_A = ("one", "use", "uni", "eu")
SOUNDS_LIKE_AN = ("hour", "honest", "heir")


def test_stories_are_well_formed_english() -> None:
    for number in range(1500):
        text = story(dice("test", "story", number)).text
        assert 60 <= len(text.split()) <= 190, text
        assert re.fullmatch(r"[A-Za-z0-9 .,!?:;'\"-]+", text), text
        assert "  " not in text
        assert not re.search(r" [.,!?]|[.,!?][A-Za-z]|,\.|\.\.(?!\.)", text), text
        assert re.search(r"[.!?]\"?$", text), text
        assert text.count('"') % 2 == 0, text
        for word in re.findall(r"\b[Aa] ([aeiou]\w*)", text):
            assert word.startswith(SOUNDS_LIKE_A), (word, text)
        for word in re.findall(r"\b[Aa]n (\w+)", text):
            assert word[0] in "aeiou" or word.startswith(SOUNDS_LIKE_AN), (word, text)
        outside = re.sub(r'"[^"]*"', '""', text)
        assert not re.search(r"[.!?] [a-z]", outside), text
        assert not re.search(r'(?:^|[.!?]"? )"[a-z]', text), text
        assert not re.search(r"\b(\w+) \1\b", re.sub(r"\b(Ha|tap|had had)\b", "", text)), text


def test_questions_about_stories_are_answered_by_them() -> None:
    seen = set()
    for number in range(1500):
        told = story(dice("test", "questions", number))
        text = told.text.lower()
        for question, answer in told.questions:
            seen.add(question.split()[0])
            if answer.startswith("because"):
                continue
            content = [w for w in re.findall(r"\w+", answer.lower()) if len(w) > 3]
            assert all(word in text for word in content), (question, answer, told.text)
    assert {"Who", "Where", "What", "Why", "Whose"} <= seen


def test_there_are_dozens_of_plots_and_stories_differ() -> None:
    assert len(plots()) >= 40
    for plot in plots():
        assert len(plot.questions) >= 3
        assert sum(len(step.wordings) > 1 for step in plot.steps) >= 5
    assert len({story(dice("test", n)).text for n in range(2000)}) == 2000
