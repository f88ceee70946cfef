"""Frozen configuration: what the checkpoint is (ModelConfig) and how it is run (EngineConfig).

Knows names, defaults and derived values; must not know torch, files or the environment.
"""

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the rotary table of compressed layers (model description 3.3)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Shape of the image encoder; 0 layers means that the checkpoint has none."""

    num_hidden_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    intermediate_size: int = 0
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one checkpoint; fields carry the names of config.json.

    Built and validated by `deepinfer.checkpoint.hf_config`. Lists of config.json are tuples here,
    `candidate_source_layer_id` is None when candidates are off.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temp: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vision: VisionConfig

    def compress_ratio(self, layer: int) -> int:
        """Tokens per compressed entry of backbone layer `layer`; 0 = sliding window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose entries and index keys `layer` reads: the nearest at or before it."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose top-k selection `layer` uses (the nearest at or before it)."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def restricts_to_candidates(self, layer: int) -> bool:
        """Whether index source `layer` may only select inside the published candidate blocks."""
        source = self.candidate_source_layer_id
        return source is not None and layer > source

    @property
    def boundary_layer(self) -> int | None:
        """First layer with one entry per token; truncated prefill drops rows from here on (6.2)."""
        ones = [i for i in range(self.num_hidden_layers) if self.compress_ratios[i] == 1]
        return ones[0] if ones else None

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token and Engram layer: heads times n-gram orders."""
        return self.engram_n_heads * (self.engram_max_ngram_size - 1)

    @property
    def has_drafter(self) -> bool:
        """Whether the checkpoint carries DSpark draft blocks."""
        return self.num_nextn_predict_layers > 0


DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["bfloat16", "float32", "float64"]
TruncationMode = Literal["off", "mask", "compact"]
KernelsName = Literal["auto", "ref", "triton", "tile"]
FlagGemsMode = Literal["off", "fast", "right"]


@dataclass(frozen=True)
class EngineOptions:
    """What a user may say about running a checkpoint; None means "decide for me".

    Attributes:
        model: folder with config.json, tokenizer.json and safetensors.
        tokenizer: another tokenizer.json, or a folder holding one. Default: the model's.
        device: where to run. Default auto: a CUDA GPU when there is one, else the CPU.
        dtype: activation dtype. Default bfloat16, as released; float32 and float64 are for tests.
        act_quant: FP8 activations into FP8 and FP4 matrices. Default true, as released.
        max_model_len: most tokens of a sequence, prompt and output together. Default: what the
            checkpoint allows, up to 32768.
        max_num_seqs: most sequences in one step. Default 32.
        max_num_batched_tokens: most tokens in one step; longer prompts run in chunks. Default 512
            on a CPU, 2048 on a GPU.
        cache_tokens: tokens that the paged cache holds, all sequences together. Default: on a GPU
            what its memory allows, up to twice what max_num_seqs sequences can have; on a CPU
            enough for one sequence of max_model_len, at least 32768.
        page_tokens: tokens per cache page. Default 64, or what the checkpoint needs beyond.
        threads: CPU threads for arithmetic. Default: one per core.
        yoco_prefill: let prompt rows that nothing reads later stop at the boundary layer: compact
            leaves them out, mask computes them with the same result. Default off, which is exact.
        yoco_keep_tokens: prompt rows that a truncated prefill keeps. Default: window and rollback.
        ops_backend: preferred backend of every operator: ref, or triton on a GPU. Default auto:
            on a GPU the fastest kernel, on a CPU the reference.
        op: backend of one operator, like rms_norm=triton; may be given several times.
        ops_strict: an operator that falls back to its reference is an error.
        sparse_mla_backend: backend of sparse attention, the same as op sparse_attention=..., which
            comes first where one source has both.
        kernels: preferred backend of what the tile_kernels library does: ref, triton or tile.
        batch_invariant: logits of a request are the same bit for bit whatever runs beside it: only
            kernels whose rows do not depend on each other are taken, and where PyTorch multiplies,
            as on a CPU, rows are computed one by one, which makes prompts slow.
        simulate_no_tilelang: act as on a machine without TileLang, whose backends are then refused
            with that reason.
        prefix_checkpoints: states kept so that prompts which begin like an earlier one take over
            its cache; each is as large as the state of one sequence. 0 turns this off. Default: two
            for each of max_num_seqs, but 0 with yoco_prefill, whose caches are not complete.
        max_queue: most requests that may wait; more are refused. Default 4096.
        overlap: plan a step while the one before runs. Default true on a GPU.
        enforce_eager: no CUDA graphs: slower, but starts faster. Default false on a GPU.
        sync_guard: an operation that makes the host wait for the GPU is an error. Default true.
        gpu_memory: part of the GPU's memory that is planned for, in (0, 1]. Default 0.9.
        log_interval: seconds between lines in the log about what the engine does. Default 0: none.
        flaggems: let FlagGems do what PyTorch's own operators do, as far as an allow-list goes:
            fast takes operators that are right and not slower, right takes all that are right.
            Default off.
        flaggems_allowlist: file that `deepinfer screen` wrote. Default: a shipped one for these
            versions and this GPU.
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    device: DeviceName | None = None
    dtype: DtypeName | None = None
    act_quant: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    cache_tokens: int | None = None
    page_tokens: int | None = None
    threads: int | None = None
    yoco_prefill: TruncationMode | None = None
    yoco_keep_tokens: int | None = None
    ops_backend: str | None = None
    op: tuple[str, ...] | None = None
    ops_strict: bool | None = None
    sparse_mla_backend: str | None = None
    kernels: KernelsName | None = None
    batch_invariant: bool | None = None
    simulate_no_tilelang: bool | None = None
    prefix_checkpoints: int | None = None
    max_queue: int | None = None
    overlap: bool | None = None
    enforce_eager: bool | None = None
    sync_guard: bool | None = None
    gpu_memory: float | None = None
    log_interval: float | None = None
    flaggems: FlagGemsMode | None = None
    flaggems_allowlist: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How a checkpoint is run, every value decided; fields as in EngineOptions."""

    model: str
    tokenizer: str
    device: Literal["cpu", "cuda"]
    dtype: DtypeName
    act_quant: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_tokens: int
    page_tokens: int
    threads: int
    yoco_prefill: TruncationMode
    yoco_keep_tokens: int
    ops_backend: str
    op: tuple[str, ...]
    ops_strict: bool
    sparse_mla_backend: str
    kernels: KernelsName
    batch_invariant: bool
    simulate_no_tilelang: bool
    prefix_checkpoints: int
    max_queue: int
    overlap: bool
    enforce_eager: bool
    sync_guard: bool
    gpu_memory: float
    log_interval: float
    flaggems: FlagGemsMode
    flaggems_allowlist: str

    @property
    def prefix_caching(self) -> bool:
        """Whether sequences take over what others with the same beginning have computed."""
        return self.prefix_checkpoints > 0

    @property
    def state_slots(self) -> int:
        """States of sequences that the cache holds, running ones and those kept for prefixes."""
        return self.max_num_seqs + self.prefix_checkpoints


@dataclass(frozen=True)
class Host:
    """What the machine offers, as far as defaults depend on it."""

    cuda: bool
    cores: int


@dataclass(frozen=True)
class Decision:
    """One line of the start-up table: a setting, its value, and who decided it."""

    name: str
    value: Any
    decided_by: Literal["user", "environment", "default"]


# Longest default context: one sequence of it fits the default cache.
DEFAULT_TOKENS = 32768


def max_rollback(model: ModelConfig) -> int:
    """Most tokens by which a sequence is taken back: a rejected draft block and its first token."""
    return model.dspark_block_size + 1 if model.has_drafter else 1


def _count(given: dict[str, Any], name: str, otherwise: int) -> int:
    """A given positive count, to fit another default to; nonsense is refused later."""
    value = given.get(name)
    return value if type(value) is int and value > 0 else otherwise


def _defaults(model: ModelConfig, host: Host, given: dict[str, Any]) -> dict[str, Any]:
    device = given["device"] if given.get("device", "auto") != "auto" else (
        "cuda" if host.cuda else "cpu"
    )  # fmt: skip
    ratios = [model.compress_ratio(layer) for layer in model.kv_source_layer_ids]
    blocks = model.candidate_block_size if model.candidate_source_layer_id is not None else 1
    unit = math.lcm(*(ratio * blocks for ratio in ratios)) if ratios else 1
    longest = min(model.max_position_embeddings, _count(given, "cache_tokens", DEFAULT_TOKENS))
    length = _count(given, "max_model_len", longest)
    truncates = given.get("yoco_prefill", "off") != "off"
    sequences = min(32, _count(given, "max_num_batched_tokens", 32))
    on_gpu = device == "cuda"
    return {
        "tokenizer": given["model"],
        "device": device,
        "dtype": "bfloat16",
        "act_quant": True,
        "max_model_len": length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(2048 if on_gpu else 512, _count(given, "max_num_seqs", 1)),
        "cache_tokens": max(length, DEFAULT_TOKENS),
        "page_tokens": -(-64 // unit) * unit,
        "threads": host.cores,
        "yoco_prefill": "off",
        "yoco_keep_tokens": model.sliding_window + max_rollback(model) if truncates else 0,
        "ops_backend": "auto",
        "op": (),
        "ops_strict": False,
        "sparse_mla_backend": "auto",
        "kernels": "auto",
        "batch_invariant": False,
        "simulate_no_tilelang": False,
        "prefix_checkpoints": 0 if truncates else 2 * _count(given, "max_num_seqs", sequences),
        "max_queue": 4096,
        "overlap": on_gpu,
        "enforce_eager": not on_gpu or truncates,
        "sync_guard": on_gpu,
        "gpu_memory": 0.9,
        "log_interval": 0.0,
        "flaggems": "off",
        "flaggems_allowlist": "",
    }


def resolve(
    options: EngineOptions, environment: dict[str, Any], model: ModelConfig, host: Host
) -> tuple[EngineConfig, list[Decision]]:
    """Decide every setting: the user's word, else the environment's, else a default.

    Raises:
        ConfigError: a value is out of range or two settings contradict each other.
    """
    by_user = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    given = {**environment, **by_user}
    _check_types(given)
    defaults = _defaults(model, host, given)
    if given.get("device") == "auto":
        del given["device"]
    values = {**defaults, **given}
    values["op"] = _merged(_operator_wishes(environment), _operator_wishes(by_user))
    config = EngineConfig(**values)
    _check(config, model, host, given)
    decisions = [
        Decision(
            field.name,
            values[field.name],
            "user" if field.name in by_user and field.name in given
            else "environment" if field.name in given
            else "default",
        )
        for field in dataclasses.fields(EngineConfig)
    ]  # fmt: skip
    return config, decisions


def _operator_wishes(given: dict[str, Any]) -> tuple[str, ...]:
    """OPERATOR=BACKEND of one source; sparse_mla_backend is the general word for its operator."""
    backend = given.get("sparse_mla_backend", "auto")
    general = () if backend == "auto" else (f"sparse_attention={backend}",)
    return (*general, *given.get("op", ()))


def _merged(environment: tuple[str, ...], user: tuple[str, ...]) -> tuple[str, ...]:
    """NAME=BACKEND of both, the user's word for an operator before the environment's."""
    chosen: dict[str, str] = {}
    for entry in (*environment, *user):
        name, separator, backend = entry.partition("=")
        if not (name and separator and backend):
            raise _wrong("op", entry, "OPERATOR=BACKEND, like rms_norm=triton")
        chosen[name] = backend
    return tuple(f"{name}={backend}" for name, backend in chosen.items())


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r}; expected {expected}")


def _check_types(given: dict[str, Any]) -> None:
    """What defaults are worked out from has to be of the right kind first."""
    least = {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "cache_tokens": 1,
             "page_tokens": 1, "threads": 1, "yoco_keep_tokens": 0, "prefix_checkpoints": 0,
             "max_queue": 1}  # fmt: skip
    switches = ("act_quant", "ops_strict", "batch_invariant", "simulate_no_tilelang",
                "overlap", "enforce_eager", "sync_guard")  # fmt: skip
    numbers = {
        "gpu_memory": "a number in (0, 1]",
        "log_interval": "a number of seconds, 0 for none",
    }
    for name, value in given.items():
        if name in least and (type(value) is not int or value < least[name]):
            raise _wrong(name, value, f"a whole number of at least {least[name]}")
        if name in switches and not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        if name in numbers and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise _wrong(name, value, numbers[name])
        if name in ("ops_backend", "sparse_mla_backend") and not isinstance(value, str):
            raise _wrong(name, value, "the name of a backend, like triton or ref")
        if name == "flaggems_allowlist" and not isinstance(value, str):
            raise _wrong(name, value, "the name of a file")
        if name == "op" and not (isinstance(value, tuple) and all(type(v) is str for v in value)):
            raise _wrong(name, value, "a tuple of texts like rms_norm=triton")


def _check(config: EngineConfig, model: ModelConfig, host: Host, given: dict[str, Any]) -> None:
    for name, choices in (("dtype", get_args(DtypeName)), ("device", ("cpu", "cuda")),
                          ("yoco_prefill", get_args(TruncationMode)),
                          ("kernels", get_args(KernelsName)),
                          ("flaggems", get_args(FlagGemsMode))):  # fmt: skip
        if getattr(config, name) not in choices:
            raise _wrong(name, getattr(config, name), f"one of {', '.join(choices)}")
    if config.device == "cuda" and not host.cuda:
        raise _wrong("device", "cuda", "a machine with a CUDA GPU and a CUDA build of torch")
    if config.flaggems != "off" and config.device == "cpu":
        raise _wrong(
            "flaggems", config.flaggems, "off on a CPU: FlagGems has kernels for GPUs only"
        )
    if config.flaggems == "off" and config.flaggems_allowlist:
        raise _wrong("flaggems_allowlist", config.flaggems_allowlist, "flaggems fast or right")
    if config.max_num_batched_tokens < config.max_num_seqs:
        expected = f"at least max_num_seqs = {config.max_num_seqs}, a token for each"
        raise _wrong("max_num_batched_tokens", config.max_num_batched_tokens, expected)
    if config.max_model_len > model.max_position_embeddings:
        expected = f"at most max_position_embeddings = {model.max_position_embeddings}"
        raise _wrong("max_model_len", config.max_model_len, expected)
    if config.cache_tokens < config.max_model_len:
        expected = f"at least max_model_len = {config.max_model_len}"
        raise _wrong("cache_tokens", config.cache_tokens, expected)
    if not 0 < config.gpu_memory <= 1:
        raise _wrong("gpu_memory", config.gpu_memory, "a number in (0, 1]")
    if config.device == "cpu" and "gpu_memory" in given:
        raise _wrong("gpu_memory", config.gpu_memory, "a GPU: on a CPU nothing is planned")
    if config.device == "cpu" and not config.enforce_eager:
        raise _wrong("enforce_eager", False, "true on a CPU: CUDA graphs need a GPU")
    if config.device == "cpu" and config.sync_guard:
        raise _wrong("sync_guard", True, "false on a CPU, where nothing waits for a device")
    _check_truncation(config, model, given)


def _check_truncation(config: EngineConfig, model: ModelConfig, given: dict[str, Any]) -> None:
    if config.yoco_prefill == "off":
        if "yoco_keep_tokens" in given:
            raise _wrong(
                "yoco_keep_tokens", config.yoco_keep_tokens, "yoco_prefill mask or compact"
            )
        return
    if config.prefix_caching:
        expected = "0 with yoco_prefill, whose caches are not complete"
        raise _wrong("prefix_checkpoints", config.prefix_checkpoints, expected)
    if not config.enforce_eager:
        raise _wrong("enforce_eager", False, "true with yoco_prefill, whose decode has no graphs")
    boundary = model.boundary_layer
    if boundary is None:
        raise _wrong("yoco_prefill", config.yoco_prefill, "off: no layer has compress ratio 1")
    least = model.sliding_window + max_rollback(model)
    if config.yoco_keep_tokens < least:
        expected = f"at least window and rollback, {least}"
        raise _wrong("yoco_keep_tokens", config.yoco_keep_tokens, expected)
    late = [i for i in model.engram_layer_ids if i >= boundary]
    late += [i for i in model.kv_source_layer_ids if i > boundary]
    early = [i for i in model.dspark_target_layer_ids if model.has_drafter and i < boundary]
    if late or early:
        raise _wrong(
            "yoco_prefill", config.yoco_prefill,
            f"off: layers {late + early} need every row on the wrong side of layer {boundary}",
        )  # fmt: skip
