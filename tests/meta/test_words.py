"""Words that the project does not use, and paths of one machine, stay out of code and documents."""

import re

import pytest

# Each of these has another name here: expected values, draft, DSpark, overlap.
BANNED = ("golden", "nextn", "mtp", "dflash", "zos")

# Pattern -> why it may contain a banned word.
ALLOWED_NAMES = {
    r"num_nextn_predict_layers": "a key of the released config.json",
    r"""\bmtp\\?\.(?=[\d{*(<\\\["'])""": "first part of tensor names in the released checkpoint",
    r"""(?<=["'])mtp(?=["'])""": "the same, split at its dots",
    r"(?<=\w)\.mtp\b": "the module whose parameters carry that name",
    r"DEEPINFER_USE_NEXTN_DECODE": "an environment variable that users know",
    r"DEEPINFER_ENABLE_MTP_VARLEN": "an environment variable that users know",
}

# File -> why its text is not searched.
UNSEARCHED = {
    "tests/meta/test_words.py": "it lists the words and paths",
    "tools/released_kernels.json": "kernel files of the released engine keep their names",
    "docs/ops.md": "the same",
}

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
MACHINE_PATH = re.compile(r"(?<![\w.~/])/(?:home|opt|root|tmp|work)/[\w.]")


def banned_words(line: str) -> set[str]:
    """Banned words of `line`, alone or as a part of a snake_case or CamelCase name."""
    for pattern in ALLOWED_NAMES:
        line = re.sub(pattern, " ", line)
    parts = {part.lower() for part in WORD.findall(line)}
    whole = {part.lower() for part in re.findall(r"[A-Za-z]+", line)}
    return (parts | whole) & set(BANNED)


def test_no_banned_words(texts: dict[str, str]) -> None:
    wrong = [f"{name}: in its name: {word}" for name in texts for word in banned_words(name)]
    for name, text in texts.items():
        if name not in UNSEARCHED:
            for number, line in enumerate(text.splitlines(), 1):
                wrong += [f"{name}:{number}: {word}" for word in banned_words(line)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_paths_of_one_machine(texts: dict[str, str]) -> None:
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        if name not in UNSEARCHED
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a golden value", {"golden"}),
        ("class MTPHead:", {"mtp"}),
        ("nextn_tokens = 1", {"nextn"}),
        ("NextN", {"nextn"}),
        ("DFlash, then ZOS", {"dflash", "zos"}),
        ("the mtp. And", {"mtp"}),
        ('f"mtp.{i}.norm.weight"', set()),
        ('parts[0] == "mtp"', set()),
        ("self.mtp = model.mtp", set()),
        ("config.num_nextn_predict_layers", set()),
        ("DEEPINFER_ENABLE_MTP_VARLEN=1", set()),
        ("smtp, goldenrod, mozos", set()),
    ],
)
def test_the_search_knows_words(line: str, words: set[str]) -> None:
    assert banned_words(line) == words


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /tmp/x", True),
        ("open('/work/main')", True),
        ("https://example.org/work/x", False),
        ("models/tmp/x", False),
        ("a /tmp folder", False),
    ],
)
def test_the_search_knows_paths(line: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) == found
