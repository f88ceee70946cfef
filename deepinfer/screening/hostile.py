"""Hostile calls, made from one that the engine makes.

Knows shapes, strides, dtypes and values that kernels trip over; must not know libraries. A call
that PyTorch itself refuses is dropped where it is run, so that nothing here has to know what each
operator takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deepinfer.screening.arguments import (
    TARGET,
    Data,
    Fill,
    TensorData,
    change,
    contiguous,
    reshaped,
    tensors,
)
from deepinfer.screening.catalog import Call
from deepinfer.screening.schema import argument_names, base_name, pointwise, written

_WIDE = 1 << 18  # elements up to which an engine's call is given hostile values as it is
# Whole numbers that stand for places: others would be out of range.
INDEXED = {
    "index", "index_put", "index_put_", "_index_put_impl_", "index_select", "index_add",
    "index_add_", "index_copy", "index_copy_", "index_fill", "gather", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "scatter_reduce", "embedding", "repeat_interleave", "one_hot",
    "take", "put", "bincount", "_grouped_mm", "select_scatter", "segment_reduce",
}  # fmt: skip
_WRAPPING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # -1 is the last
_FAR = 2**30 + 8  # three rows so far apart reach past 2^31 elements
_DIMS = {"dim", "dims", "dim0", "dim1", "axis"}
_PAIRS = (
    ("int64", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16"), ("int32", "int64"),
    ("bool", "float32"), ("uint8", "int32"), ("float32", "float64"),
)  # fmt: skip

Hostile = Iterator[tuple[str, str, Data]]


def hostile_calls(operator: str, call: Call) -> Hostile:
    """(kind, label, arguments) of hostile calls that are made from one of the engine's."""
    tiny = shrunk(operator, call.args, {})
    yield "tiny", "", tiny
    yield from _shapes(operator, call.args)
    yield from _strides(operator, tiny)
    yield from _dims(operator, tiny)
    for wide in (tiny, call.args) if call.numel <= _WIDE else (tiny,):
        yield from _values(operator, wide, "tiny" if wide is tiny else "whole")
    yield from _aliases(tiny)


def shrunk(operator: str, args: Data, sizes: dict[int, int]) -> Data:
    """The same call with small sizes: equal sizes stay equal, 1 stays 1.

    Args:
        sizes: what certain sizes become; others become 3, 4, 5, ... in the order of appearance.
    """
    new = dict(sizes)
    fresh = iter(n for n in range(3, 99) if n not in sizes.values())
    for spec in tensors(args):
        for size in spec.shape:
            if size > 1 and size not in new:
                new[size] = next(fresh)

    def smaller(_: int, spec: TensorData) -> TensorData:
        small = reshaped(spec, [new.get(size, size) for size in spec.shape])
        return replace(small, fill=_in_range(operator, spec, new))

    return _numbers(change(args, smaller), new)


def _in_range(operator: str, spec: TensorData, new: dict[int, int]) -> Fill:
    """Places stay places once sizes have become smaller."""
    fill = spec.fill if spec.fill.kind != "given" else Fill("whole", 0, 1)
    if base_name(operator) not in INDEXED or fill.kind not in ("whole", "rising"):
        return fill
    top = min((n for n in new.values() if n), default=1) - 1
    return replace(fill, low=max(-top - 1, min(fill.low, top)), high=min(fill.high, top))


def indexed(operator: str) -> bool:
    """Whether whole numbers among the operator's arguments are places."""
    return base_name(operator) in INDEXED


def _numbers(args: Data, new: dict[int, int]) -> Data:
    """Shapes among the arguments follow the sizes; a lone number does not, it may mean anything."""

    def visit(item: Data) -> Data:
        if isinstance(item, list) and item and all(type(i) is int for i in item):
            return [new.get(i, i) if i > 1 else i for i in item]
        return item

    return {
        "args": [visit(item) for item in args["args"]],
        "kwargs": {name: visit(item) for name, item in args["kwargs"].items()},
    }


def _shapes(operator: str, args: Data) -> Hostile:
    specs = list(tensors(args))
    sizes = list(dict.fromkeys(size for spec in specs for size in spec.shape if size > 1))
    if sizes:
        yield "no elements", "rows", shrunk(operator, args, {sizes[0]: 0})
        if len(sizes) > 1:
            yield "no elements", "columns", shrunk(operator, args, {sizes[-1]: 0})
        yield "one element", "", shrunk(operator, args, dict.fromkeys(sizes, 1))
    if specs:
        flat = _numbers(change(args, lambda _, spec: reshaped(spec, [])), {})
        yield "no dimensions", "", _with_dims(operator, flat, 0)
    if not pointwise(operator) or len([s for s in specs if s.where == TARGET]) < 2:
        return
    own = len(written(operator)) > 0  # the written argument has the whole shape
    patterns = (
        ([3, 4], [4]), ([3, 4], [3, 1]), ([3, 4], []), ([2, 3, 4], [3, 1]),
    ) if own else (
        ([3, 1], [1, 4]), ([1, 4], [3, 1]), ([4], [3, 4]), ([3, 4], [3, 1]), ([3, 1], [3, 4]),
        ([], [3, 4]), ([3, 4], []), ([3, 1], [4]), ([2, 1, 4], [3, 1]),
    )  # fmt: skip
    for shapes in patterns:
        yield "broadcast", " and ".join(map(str, shapes)), _of_shapes(args, shapes)


def _of_shapes(args: Data, shapes: Sequence[Sequence[int]]) -> Data:
    """The first tensor with one shape, the others with the other."""

    def new(number: int, spec: TensorData) -> TensorData:
        return reshaped(spec, shapes[min(number, 1)])

    return change(args, new)


def _strides(operator: str, tiny: Data) -> Hostile:
    written_to = written(operator)

    def columns(_: int, spec: TensorData) -> TensorData:
        return replace(spec, stride=tuple(reversed(contiguous(tuple(reversed(spec.shape))))))

    def gaps(_: int, spec: TensorData) -> TensorData:
        return replace(spec, stride=tuple(2 * step for step in contiguous(spec.shape)))

    def repeated(number: int, spec: TensorData) -> TensorData:
        if number in written_to or not spec.shape:
            return spec
        return replace(spec, stride=(0, *contiguous(spec.shape)[1:]))

    specs = list(tensors(tiny))
    for label, new in (("column-major", columns), ("with gaps", gaps)):
        yield "strides", label, change(tiny, new)
    if len(specs) > 1:
        first_only = change(tiny, lambda n, s: columns(n, s) if n == 0 else s)
        yield "strides", "only the first column-major", first_only
    yield "expanded", "", change(tiny, repeated)
    far = next((n for n, s in enumerate(specs) if s.shape and s.shape[0] > 2), None)
    if far is not None:
        size = specs[far].shape[0]
        step = -(-2 * _FAR // (size - 1))
        yield (
            "past 2^31",
            "",
            change(tiny, lambda n, s: replace(s, stride=(step, *s.stride[1:])) if n == far else s),
        )


def _dims(operator: str, tiny: Data) -> Hostile:
    first = next(tensors(tiny), None)
    if first is not None and first.shape:
        other = _with_dims(operator, tiny, len(first.shape))
        if other != tiny:
            yield "dimensions from the end", "", other
        for dim in range(-1, -len(first.shape) - 1, -1):
            moved = _with_dims(operator, tiny, len(first.shape), dim)
            if moved != tiny:
                yield "another dimension", str(dim), moved


def _with_dims(operator: str, args: Data, count: int, dim: int | None = None) -> Data:
    """Dimensions counted from the other end, or all of them `dim`; 0 where there are none."""

    def turn(value: int) -> int:
        if dim is not None:
            return dim
        return 0 if not count else value - count if value >= 0 else value + count

    def visit(name: str, item: Data) -> Data:
        if name not in _DIMS:
            return item
        if type(item) is int:
            return turn(item)
        whole = isinstance(item, list) and item and all(type(i) is int for i in item)
        return [turn(i) for i in item] if whole and (dim is None or len(item) == 1) else item

    names = argument_names(operator)
    return {
        "args": [visit(name, item) for name, item in zip(names, args["args"], strict=False)],
        "kwargs": {name: visit(name, item) for name, item in args["kwargs"].items()},
    }


def _values(operator: str, args: Data, label: str) -> Hostile:
    specs = list(tensors(args))
    floats = [n for n, spec in enumerate(specs) if _is_float(spec)]
    if floats:
        yield "infinities and NaN", label, _filled(args, floats, Fill("specials"))
        yield "-inf", label, _filled(args, floats, Fill("low_rows"))
        yield "equal values", label, _filled(args, floats, Fill("normal", 1.0, 1.0))
    if len(floats) > 1:
        yield (
            "infinities and NaN",
            f"{label}, first only",
            _filled(args, floats[:1], Fill("specials")),
        )
    whole = [n for n, spec in enumerate(specs) if spec.dtype in ("int64", "int32")]
    if base_name(operator) in _WRAPPING:
        for number in whole[1:] if whole[:1] == [0] else whole:
            last = Fill("whole", -1 - specs[number].fill.high, -1)
            yield "negative places", label, _filled(args, [number], last)
    elif base_name(operator) not in INDEXED and any(specs[n].dtype == "int64" for n in whole):
        large = [n for n in whole if specs[n].dtype == "int64"]
        yield "large whole numbers", label, _compared(operator, _filled(args, large, Fill("big")))


def _compared(operator: str, args: Data) -> Data:
    """A number that tensors are compared with is one that float32 does not have."""
    names = argument_names(operator)
    given = [
        2**24 + 1 if name == "other" and isinstance(item, int | float) else item
        for name, item in zip(names, args["args"], strict=False)
    ]
    return {**args, "args": given}


def _filled(args: Data, numbers: Sequence[int], fill: Fill) -> Data:
    """Some of the tensors with other values."""
    return change(args, lambda n, spec: replace(spec, fill=fill) if n in numbers else spec)


def _is_float(spec: TensorData) -> bool:
    return spec.dtype.startswith(("float", "bfloat"))


def other_dtypes(operator: str, call: Call) -> Hostile:
    """Dtypes that the engine may or may not call the operator with."""
    tiny = shrunk(operator, call.args, {})
    specs = [s for s in tensors(tiny) if s.where == TARGET]
    if base_name(operator) not in INDEXED:
        for dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
            yield "float8", dtype, _typed(tiny, (dtype, dtype))
    if not pointwise(operator) or not specs:
        return
    if len(specs) == 1:
        for dtype in ("int32", "int64", "bool", "float64", "float16"):
            yield "promotion", dtype, _typed(tiny, (dtype, dtype))
        return
    last = max(n for n in range(len(specs)) if n not in written(operator))

    def hosted(number: int, spec: TensorData) -> TensorData:
        return replace(reshaped(spec, []), where="cpu") if number == last else spec

    yield "host scalar", "", change(tiny, hosted)
    for first, second in _PAIRS:
        for pair in ((first, second), (second, first)):
            yield "promotion", " and ".join(pair), _typed(tiny, pair)


def _typed(args: Data, dtypes: tuple[str, str]) -> Data:
    """The first tensor with one dtype, the others with the other; masks stay, beside float8."""

    def new(number: int, spec: TensorData) -> TensorData:
        dtype = dtypes[min(number, 1)]
        if spec.dtype == "bool" and dtype.startswith("float8"):
            return spec
        fill = Fill() if dtype.startswith(("float", "bfloat")) else Fill("whole", 0, 3)
        return replace(spec, dtype=dtype, fill=fill)

    return change(args, new)


def _aliases(tiny: Data) -> Hostile:
    specs = list(tensors(tiny))
    for number in range(1, len(specs)):
        if specs[number].shape == specs[0].shape and specs[number].dtype == specs[0].dtype:
            yield "aliasing", f"argument {number + 1} is the first", _same(tiny, number)
    if tiny["args"] and isinstance(tiny["args"][0], list) and specs:
        one = {**tiny, "args": [tiny["args"][0][:1], *tiny["args"][1:]]}
        yield "aliasing", "a list of one", one


def _same(args: Data, again: int) -> Data:
    """The first tensor once more in another one's place."""
    first = next(tensors(args))

    def new(number: int, spec: TensorData) -> TensorData:
        return replace(first, same_as=0) if number == again else spec

    return change(args, new)
