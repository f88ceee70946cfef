"""Files and functions stay within the house limits, and the program that measures them is right."""

import sizes


def test_package_is_within_its_limits() -> None:
    found = sizes.problems(sizes.measure_package())
    assert not found, "\n" + "\n".join(found)


SOURCE = '''"""Docstring
of two lines."""

import triton  # counted


class Thing:
    """Docstring."""

    def method(self, a, *, b=1):
        """Docstring."""
        # a comment
        text = """two
lines"""

        return text

    @staticmethod
    def static(a):
        return a


@triton.jit
def kernel(a, b):
    pass


def outer(*args, **kwargs):
    async def inner():
        pass
'''


def test_lines_and_parameters_are_counted() -> None:
    file = sizes.measure(SOURCE, "x.py")
    measured = {f.name: (f.lines, f.parameters, f.is_kernel) for f in file.functions}
    assert file.lines == 15
    assert measured == {
        "Thing.method": (4, 2, False),
        "Thing.static": (2, 1, False),
        "kernel": (2, 2, True),
        "outer": (3, 2, False),
        "outer.inner": (2, 0, False),
    }


def _problems(source: str, name: str = "x.py", **exceptions: str) -> list[str]:
    renamed = {key.replace("_in_", ".py::"): why for key, why in exceptions.items()}
    return sizes.problems([sizes.measure(source, name)], renamed, main_path=())


def test_limits_are_inclusive() -> None:
    body = "    pass\n"
    assert _problems("def f(a, b, c, d, e, f, g, h):\n" + body * 59) == []
    assert len(_problems("def f():\n" + body * 60)) == 1
    assert len(_problems("def f(a, b, c, d, e, f, g, h, i):\n" + body)) == 1
    assert _problems("@triton.jit\ndef f(a, b, c, d, e, f, g, h, i):\n" + body * 149) == []
    assert len(_problems("@triton.jit\ndef f():\n" + body * 150)) == 1
    assert _problems("a = 1\n" * 400) == []
    assert len(_problems("a = 1\n" * 401)) == 1
    assert _problems("a = 1\n" * 500, "ops/x/triton.py") == []
    assert len(_problems("a = 1\n" * 501, "ops/x/triton.py")) == 1


def test_exceptions_need_a_cause_and_a_reason() -> None:
    long = "def f():\n" + "    pass\n" * 60
    assert _problems(long, x_in_f="a table, best read in one piece") == []
    assert _problems(long, x_in_f="") == ["EXCEPTIONS['x.py::f'] gives no reason"]
    assert _problems("a = 1\n", x_in_f="why") == ["EXCEPTIONS['x.py::f'] is not needed any more"]


def test_main_path_has_a_budget() -> None:
    files = [sizes.measure("a = 1\n" * 300, f"{i}.py") for i in range(6)]
    path = tuple(file.name for file in files)
    assert sizes.problems(files, {}, path[:5]) == []
    assert sizes.problems(files, {}, path) == ["the main path has 1800 code lines, at most 1500"]
    assert sizes.problems([], {}, ("a.py",)) == ["MAIN_PATH names a.py, which does not exist"]
