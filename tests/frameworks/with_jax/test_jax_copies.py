"""The ledger of JAX: each copy with its bytes, none invented, nothing compiled anew or kept."""

import re
import threading

import pytest

from gpumagic import faults
from gpumagic.errors import ImplicitCopyError
from gpumagic.ledger.entry import Tally
from gpumagic.ledger.ledger_view import advise

ON_1 = "with jax.default_device(gpu[1]):\n    "
TO_0, TO_1 = ("cpu", "cuda:0"), ("cpu", "cuda:1")
# A program, and the bytes that it moves: `a`, `b`, `loose_a`, `loose_b` and `n` have 32 each.
PROGRAMS = [
    ("jax.device_put(n, gpu[0])", {TO_0: 32}),
    ("jax.device_put(a, gpu[1])", {("cuda:0", "cuda:1"): 32}),
    ("jax.device_put(a, gpu[0])", {}),
    ("jax.device_put(loose_a, gpu[0])", {}),
    (
        "jax.device_put({'w': n, 'b': [n, a]}, gpu[1])",
        {TO_1: 64, ("cuda:0", "cuda:1"): 32},
    ),
    ("jax.device_put(a, jax.devices('cpu')[0])", {("cuda:0", "cpu"): 32}),
    ("jax.device_put(n, jax.devices('cpu')[0])", {}),
    ("jax.device_put(jax.random.key(0), gpu[1])", {TO_1: 8}),
    (ON_1 + "jnp.asarray(n)", {TO_1: 32}),
    (ON_1 + "jnp.array([1.0, 2.0, 3.0])", {TO_1: 12}),
    (ON_1 + "jnp.ones(8) + 1", {}),
    ("a + loose_b", {("cuda:1", "cuda:0"): 32}),
    ("loose_b + a", {("cuda:1", "cuda:0"): 32}),
    ("loose_b + 1", {("cuda:1", "cpu"): 32}),
    ("a + n", {TO_0: 32}),
    ("n @ a", {TO_0: 32}),
    ("a + 1.5", {}),
    ("a + a", {}),
    ("jnp.where(a > 0, loose_b, 0)", {("cuda:1", "cuda:0"): 32}),
    ("jnp.stack([a, loose_b])", {("cuda:1", "cuda:0"): 32}),
    ("jnp.concatenate([a, n])", {TO_0: 32}),
    ("a.at[2:4].set(n[2:4])", {TO_0: 8}),
    (
        "f = jax.jit(jnp.multiply)\nfor _ in range(5):\n    f(a, loose_b)",
        {("cuda:1", "cuda:0"): 160},
    ),
    ("f = jax.jit(jnp.multiply)\nfor _ in range(5):\n    f(a, n)", {TO_0: 160}),
    ("f = jax.jit(jnp.multiply)\nf(a, a)\nf(b, b)\nf(a, loose_b)", {("cuda:1", "cuda:0"): 32}),
    ("jax.jit(lambda p: p['w'] * p['b'])({'w': n, 'b': a})", {TO_0: 32}),
    ("jax.jit(lambda x, y: x + 1)(a, n)", {}),
    ("jax.jit(lambda x: x + 1, donate_argnums=0)(jax.device_put(n, gpu[0]))", {TO_0: 32}),
    ("jax.jit(lambda x: x * loose_b)(a)", {}),
    (
        "jax.grad(lambda x: (x * loose_b).sum())(a)",
        {("cuda:1", "cuda:0"): 32, ("cuda:1", "cpu"): 32},
    ),
    ("jax.lax.fori_loop(0, 3, lambda i, c: c + loose_b, a)", {("cuda:1", "cuda:0"): 32}),
    ("np.asarray(a)", {("cuda:0", "cpu"): 32}),
    ("np.asarray(a)\nnp.array(a)\nprint(a)", {("cuda:0", "cpu"): 32}),
    ("jax.device_get({'a': a, 'b': b})", {("cuda:0", "cpu"): 32, ("cuda:1", "cpu"): 32}),
    ("a.tolist()", {("cuda:0", "cpu"): 32}),
    ("__import__('pickle').dumps(a)", {("cuda:0", "cpu"): 32}),
    ("__import__('copy').deepcopy(a)", {}),
]
# Over both GPUs: half of it goes to each, or all of it.
SHARDED = [
    ("jax.device_put(n, halves)", {TO_0: 16, TO_1: 16}),
    ("jax.device_put(n, both)", {TO_0: 32, TO_1: 32}),
    ("jax.device_put(a, halves)", {("cuda:0", "cuda:1"): 16}),
    ("jax.device_put(a, both)", {("cuda:0", "cuda:1"): 32}),
    ("jax.jit(jnp.sum, in_shardings=halves)(n)", {TO_0: 16, TO_1: 16}),
    ("jax.jit(jnp.sum, in_shardings=halves)(jax.device_put(n, halves))", {TO_0: 16, TO_1: 16}),
    (
        "np.asarray(jax.device_put(n, halves))",
        {TO_0: 16, TO_1: 16, ("cuda:0", "cpu"): 16, ("cuda:1", "cpu"): 16},
    ),
    ("jax.pmap(jnp.sin, devices=gpu)(np.ones((2, 4), np.float32))", {TO_0: 16, TO_1: 16}),
]
# What is copied in silence, and where to; the third line does it.
SILENT = [
    ("a + loose_b", ("cuda:1", "cuda:0")),
    ("loose_b * a", ("cuda:1", "cuda:0")),
    ("a - n", TO_0),
    ("n / b", TO_1),
    ("a @ loose_b", ("cuda:1", "cuda:0")),
    ("loose_b.sum()", ("cuda:1", "cpu")),
    ("loose_b[2:4]", ("cuda:1", "cpu")),
    ("loose_b.reshape(2, 4)", ("cuda:1", "cpu")),
    ("jnp.dot(loose_b, a)", ("cuda:1", "cuda:0")),
    ("jnp.maximum(b, loose_a)", ("cuda:0", "cuda:1")),
    ("jnp.where(b > 0, b, n)", TO_1),
    ("jnp.stack([b, loose_a])", ("cuda:0", "cuda:1")),
    ("b.at[:].set(n)", TO_1),
    ("b.at[:].multiply(n)", TO_1),
    ("step(a, loose_b)", ("cuda:1", "cuda:0")),
    ("step(a, n)", TO_0),
    ("jax.vmap(step)(b, loose_a)", ("cuda:0", "cuda:1")),
    ("jax.value_and_grad(lambda x: (x * n).sum())(a)", TO_0),
    ("jax.lax.scan(lambda c, x: (c + x, x), a[0], n)", TO_0),
    ("jax.tree.map(jnp.add, {'w': b}, {'w': loose_a})", ("cuda:0", "cuda:1")),
    ("print(a)", ("cuda:0", "cpu")),
    ("a.tolist()", ("cuda:0", "cpu")),
]
# On GPU 0 with its arrays: nothing is copied that was not asked for.
CLEAN = """
a[np.array([], int)]
a + a
a * 2.5 - 1
a @ a
a[3]
a[2:5]
a[::-1]
a.at[0].set(3.0)
a.at[2:4].add(1)
a + jnp.ones(8)
a + jnp.arange(8)
a + loose_a
jnp.where(a > 0, a, 0)
jnp.linspace(0, 1, 8) * a
jnp.concatenate([a, jnp.zeros(2)])
jnp.linalg.norm(a)
jnp.sort(a)
jnp.argmax(a)
jnp.fft.fft(a)
jnp.einsum('i,i->', a, a)
jnp.isnan(a).any()
a.astype(jnp.bfloat16)
a.reshape(2, 4).T @ a[:2]
jax.nn.softmax(a)
jax.nn.one_hot(jnp.arange(3), 4)
jax.random.normal(jax.random.key(0), (8,)) + a
jax.random.split(jax.random.PRNGKey(1))
jax.jit(lambda x: jnp.tanh(x) * 2)(a)
jax.jit(lambda x, k: x * k, static_argnums=1)(a, 3)
jax.grad(lambda x: (x ** 2).sum())(a)
jax.vmap(lambda x: x * 2)(a)
jax.lax.scan(lambda c, x: (c + x, c), 0.0, a)
jax.lax.cond(True, jnp.sin, jnp.cos, a)
jax.checkpoint(jnp.sin)(a)
jax.jacobian(jnp.sin)(a)
[x for x in a]
jax.tree.map(jnp.add, (a, a), (a, a))
jax.device_put(n, gpu[0]) + a
jnp.asarray(n) + a
jax.block_until_ready(a + 1)
jax.debug.print('{}', 1)
""".strip().splitlines()


@pytest.mark.parametrize(("code", "moved"), PROGRAMS + SHARDED)
def test_the_bytes_are_those_that_move(counted, code, moved):
    ran = counted(code)
    assert ran.error is None
    assert ran.moved == moved
    assert faults.all_kept() == []


@pytest.mark.slow
@pytest.mark.parametrize(("code", "moved"), PROGRAMS)
def test_the_bytes_are_those_that_jax_itself_logs(names, code, moved, capfd, monkeypatch):
    """Its transfer guard is in C++, and tells of each copy to a device, unless a call is kept."""
    import jax
    from jax._src import pjit

    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *args: None)
    pjit._cpp_pjit_cache_fun_only.clear()
    pjit._cpp_pjit_cache_explicit_attributes.clear()
    capfd.readouterr()
    with jax.transfer_guard("log_explicit"):
        exec(code, names)
    expected = {}
    for (_, destination), nbytes in moved.items():
        expected[destination] = expected.get(destination, 0) + nbytes
    expected.pop("cpu", None)  # the CPU's memory is read without a copy
    assert _logged(capfd.readouterr().err) == expected


def _logged(text):
    """Bytes by the GPU that they went to, of what has more than one element."""
    import numpy as np

    found = {}
    line = r"-to-device transfer: aval=ShapedArray\((\w+)\[([\d,]+)\].*dst_.*CpuDevice\(id=([12])"
    for kind, dims, number in re.findall(line, text):
        size = int(np.prod([int(n) for n in dims.split(",")]))
        gpu = f"cuda:{int(number) - 1}"
        if size > 1:
            found[gpu] = found.get(gpu, 0) + size * np.dtype(kind).itemsize
    return found


@pytest.mark.parametrize(
    ("code", "ends"),
    [*SILENT[::2], *(pytest.param(*case, marks=pytest.mark.slow) for case in SILENT[1::2])],
)
def test_what_is_copied_in_silence_is_found_at_its_line(counted, names, code, ends):
    names["step"] = names["jax"].jit(lambda x, y: x * y)
    ran = counted(f"c = a + a\n\nd = {code}\ne = b * 2")
    assert ran.error is None
    assert {(e.line, e.source, e.destination) for e in ran.implicit} == {(3, *ends)}
    strict = counted(f"c = b + b\n\nd = {code.replace('a.', '(a * 1).')}", strict=True)
    if "print" in code:
        return  # it was read: the host has it
    assert isinstance(strict.error, ImplicitCopyError)
    assert "line 3" in str(strict.error)
    assert strict.moved == {}


@pytest.mark.parametrize("lines", [CLEAN[::7], pytest.param(CLEAN, marks=pytest.mark.slow)])
def test_nothing_is_invented_in_clean_code(counted, framework, lines):
    gpu = framework.devices()[0]
    for line in lines:
        ran = counted(line, where=gpu, strict=True)
        assert (line, ran.error, ran.implicit) == (line, None, [])
        explicit = {TO_0} if "n" in re.findall(r"\w+", line) else set()
        assert {*ran.moved} <= explicit, line
    assert faults.all_kept() == []


def test_a_loop_over_numpys_arrays_is_advised_in_jaxs_words(counted):
    ran = counted("for _ in range(3):\n    a + n\n    a + loose_b\n    float(a[0])")
    said = [advise(entry).text for entry in ran.ledger]
    assert said == [
        "n is in host memory: copy it to the device, before the loop if the values never "
        'change: n = jax.device_put(n, jax.devices("gpu")[0])',
        "the same array each time; copy it before the loop: "
        'loose_b = jax.device_put(loose_b, jax.devices("gpu")[0])',
        "leave a[0] on the device, and read it once after the loop",
    ]
    assert "2 of 3 copies" in str(ran.ledger)


def test_all_arguments_of_a_compiled_call_are_named(counted):
    ran = counted(
        "step = jax.jit(lambda a, b, c: a + b * c)\nfor _ in range(20): step(a, n, n + 1)"
    )
    assert [entry.names for entry in ran.ledger] == [("n",)]
    ran = counted("m = n + 1\nstep = jax.jit(lambda a, b, c: a - b * c)\nstep(a, n, m)")
    assert [entry.names for entry in ran.ledger] == [("n", "m")]


def test_advice_names_what_each_expression_copies_and_what_holds_it(counted):
    ran = counted(
        "m, tree = n * 2, {'w': [n + 1]}\nfor _ in range(3):\n"
        "    a + n + m\n    a + tree['w'][0]\n    a + (n + 1)"
    )
    said = [advise(entry).text.partition("copy ")[::2] for entry in ran.ledger]
    gpu = 'jax.devices("gpu")[0]'
    assert [(who, how.partition("change: ")[2]) for who, how in said] == [
        ("n is in host memory: ", f"n = jax.device_put(n, {gpu})"),
        ("m is in host memory: ", f"m = jax.device_put(m, {gpu})"),
        ("tree is in host memory: ", f"tree = jax.device_put(tree, {gpu})"),
        ("an operand is in host memory: ", f"jax.device_put(…, {gpu})"),
    ]


def test_an_array_counts_as_read_once(counted):
    ran = counted("float(a[1])\nfor _ in range(3):\n    bool(a.sum() > 0)\n    np.asarray(b)")
    assert ran.ledger.waits == 4
    assert ran.moved == {("cuda:1", "cpu"): 32}


def test_an_array_of_one_element_counts_where_the_code_makes_it_and_not_as_an_operand(counted):
    assert counted(ON_1 + "jnp.asarray(n[:1])").moved == {TO_1: 4}
    assert counted("b + n[:1]").moved == {}


def test_waits_are_counted_and_named(counted):
    ran = counted("jax.block_until_ready((a, b))\na.block_until_ready()\na[0].item()")
    waits = {(e.line, e.operator, e.source, e.implicit, e.count) for e in ran.ledger}
    assert waits == {
        (1, "block_until_ready", "cuda:0", False, 1),
        (1, "block_until_ready", "cuda:1", False, 1),
        (2, "block_until_ready", "cuda:0", False, 1),
        (3, "item", "cuda:0", True, 1),
    }


def test_calls_go_by_python_only_while_something_moves_in_them(names, framework, monkeypatch):
    from jax._src import pjit

    came, real = [], pjit._get_fastpath_data
    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *args: (came.append(1), real(*args))[1])
    a, n = names["a"], names["n"]

    def comes(*operands):
        came.clear()
        for _ in range(4):
            operands[0] * operands[1]
        return len(came)

    with framework.count(Tally(), False):
        assert comes(a, a) == 1
    assert comes(a, a) == 0  # as nothing moved, the tables were left as they were
    with framework.count(Tally(), False):
        a * n
    assert comes(a, n) == 1
    assert comes(a, n) == 0


def test_no_program_is_compiled_anew_and_clean_calls_keep_their_way(names, framework):
    import jax

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *args, **kwargs: compiled.append(event) if "compile" in event else None
    )
    step = jax.jit(lambda x, y: x @ y + 1)
    calls = [(names["a"], names["a"]), (names["a"], names["n"]), (names["a"], names["loose_b"])]
    for x, y in calls:
        step(x, y), x + y
    assert compiled
    compiled.clear()
    for _ in range(2):
        with framework.count(Tally(), False):
            for x, y in calls * 2:
                step(x, y), x + y
        for x, y in calls:
            step(x, y), x + y
    assert compiled == []


@pytest.mark.parametrize(
    "code",
    [
        "a + b",
        "raise ValueError",
        "jax.device_put(n, gpu[0]).delete()\nx = jax.device_put(n, gpu[1])\nx.delete()\nx + 1",
        "jax.jit(lambda x: x.nothing)(a)",
        "with jax.transfer_guard('disallow'):\n    a + n",
        "jax.jit(lambda x: x if x.sum() > 0 else -x)(a)",
    ],
)
def test_errors_pass_and_nothing_stays_patched(counted, code):
    before = _doors()
    ran = counted(code)
    assert ran.error is not None
    assert _doors() == before
    assert faults.all_kept() == []
    frames = []
    trace = ran.error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert not [
        file
        for file in frames
        if "gpumagic" in file.split("/frameworks/")[0].split("/")[-1] and "/jax_" in file
    ]


def _doors():
    from jax._src import pjit
    from jax._src.array import ArrayImpl
    from jax._src.lib import xla_client

    owners = {
        xla_client: ("batched_device_put", "batched_copy_array_to_devices_with_sharding"),
        ArrayImpl: ("_value", "block_until_ready"),
        pjit: ("_get_fastpath_data",),
    }
    found = [vars(owner)[name] for owner, all_names in owners.items() for name in all_names]
    return [*found, xla_client.batched_block_until_ready]


def test_numpy_reads_the_cpus_memory_again_afterwards(names, framework):
    a = names["np"].ones(3, "uint8")
    made = names["jax"].device_put(a, names["gpu"][0])
    with framework.count(Tally(), False):
        pass
    assert bytes(memoryview(made)) == bytes(a)


def test_threads_of_the_cell_are_counted_and_other_watches_apart(counted, names, framework):
    inner = Tally()
    names |= {"threading": threading, "framework": framework, "inner": inner}
    ran = counted(
        "t = threading.Thread(target=lambda: a + n)\nt.start()\nt.join()\n"
        "with framework.count(inner, False):\n    b + n"
    )
    assert ran.moved == {TO_0: 32, TO_1: 32}
    assert inner.ledger().nbytes == 32


@pytest.mark.slow
def test_transformations_work_the_same_while_counted(counted, names):
    code = (
        "@jax.custom_vjp\ndef f(x):\n    return x * 2\n"
        "f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 3,))\n"
        "out = [jax.grad(lambda x: f(x).sum())(a), jax.vmap(f)(a), jax.jit(jax.vmap(f))(a)]\n"
        "seen = []\n"
        "jax.jit(lambda x: (jax.debug.callback(lambda v: seen.append(float(v[0])), x), x)[1])(a)\n"
        "jax.effects_barrier()\n"
        "old = jax.device_put(n, gpu[0], may_alias=False)\n"
        "new = jax.jit(lambda x: x + 1, donate_argnums=0)(old)\n"
        "gone = old.is_deleted()\n"
        "mapped = jax.shard_map(lambda x: x * 2, mesh=halves.mesh, in_specs=halves.spec, "
        "out_specs=halves.spec)(jax.device_put(n, halves))\n"
    )
    ran = counted(code)
    assert ran.error is None
    plain = dict(names)
    exec(code, plain)
    assert names["gone"] == plain["gone"]
    assert names["seen"] == plain["seen"] == [1.0]
    assert str(names["out"]) == str(plain["out"])
    assert str(names["mapped"]) == str(plain["mapped"])


def test_a_fault_of_ours_leaves_the_cell_as_it_is(counted, framework, monkeypatch):
    monkeypatch.setattr(framework, "name_of", lambda own: 1 / 0)
    ran = counted("c = a + n\nfloat(c[0])")
    assert ran.error is None
    assert float(ran.names["c"][0]) == 2
    (fault,) = faults.all_kept()
    assert str(fault).startswith("gpumagic failed while counting a copy by JAX: ZeroDivision")


def test_an_unknown_jax_is_told_and_left_alone(framework, monkeypatch):
    from jax._src import pjit

    from gpumagic.errors import GpuError

    real = _doors()
    monkeypatch.delattr(pjit, "_get_fastpath_data")
    with pytest.raises(GpuError, match=r"copies are not counted with JAX 0\.\S+: .*_get_fast"):
        framework.count(Tally(), False).__enter__()
    monkeypatch.undo()
    assert _doors() == real
