"""A byte-level BPE tokenizer of any size with DeepSeek's special tokens.

Knows how such a tokenizer.json is built; must not know models.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids 0, 1, 2 are those of config.json; the others are what chat rendering needs as single ids.
SPECIAL_TOKENS = (
    BEGIN, END, PAD, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "｜DSML｜", "<｜latest_reminder｜>", "<｜deepseek_image｜>", "<｜draft▁noise｜>",
)  # fmt: skip
NOISE = SPECIAL_TOKENS[-1]
IMAGE = SPECIAL_TOKENS[-2]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` ids, special tokens first, digits one by one.

    The result is deterministic. When `texts` do not yield enough merges, the rest of the ids are
    placeholders `<|unused_N|>`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens(
        [AddedToken(f"<|unused_{n}|>", special=True, normalized=False) for n in range(missing)]
    )
    return tokenizer
