"""The ledger of TensorFlow: each silent copy by its line, none invented, nothing traced anew.

What TensorFlow's own device policy refuses is what is to be found.
"""

import re
import threading

import pytest
from conftest import GPUS, compiled

from gpumagic import faults
from gpumagic.device import CPU
from gpumagic.errors import ImplicitCopyError
from gpumagic.ledger import ledger_view
from gpumagic.ledger.ledger_view import advise

A, B = "cuda:0", "cuda:1"
LINEAR = "net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])\n"
FIT = "net.compile('sgd', 'mse')\nnet.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)\n"
# Programs in which something is copied in silence: the line that does it, and the bytes there.
SILENT = [
    ("c + b", 1, {("cpu", B): 32}),
    ("x = b * 2.0\nx = x - a", 2, {(A, B): 32}),
    ("x = tf.reshape(b, (1, 8))\ny = tf.matmul(x, tf.reshape(b, (8, 1)))\ntf.stack([b, c])", 3,
     {("cpu", B): 32}),
    ("v_c + b", 1, {("cpu", B): 32}),
    ("v_b.assign_add(c)", 1, {("cpu", B): 32}),
    ("v_a.assign(b)", 1, {(B, A): 32}),
    ("tf.Variable(c)", 1, {("cpu", B): 32}),
    ("y = tf.concat(\n    [b, a],\n    0,\n)", 1, {(A, B): 32}),
    ("tf.where(b > 0, b, c)", 1, {("cpu", B): 32}),
    ("tf.reduce_sum(b)\nwith tf.device('/CPU:0'):\n    s = tf.reduce_sum(b)", 3, {(B, "cpu"): 32}),
    ("with tf.device('/GPU:0'):\n    Z = a + b", 2, {(B, A): 32}),
    ("def step(x):\n    return x * a\nfor k in range(3):\n    b = step(b)", 2, {(A, B): 32}),
    ("for row in rows:\n    b = b + row", 2, {("cpu", B): 96}),
    ("with tf.GradientTape() as tape:\n    tape.watch(b)\n    y = tf.reduce_sum(b * c)", 3,
     {("cpu", B): 32}),
    ("on_cpu(tf.reshape(b, (1, 8)))", 1, {("cpu", B): 4 * (8 * 4 + 4)}),
    ("tf.gather(b, where)", 1, {("cpu", B): 16}),
]  # fmt: skip
# The same in functions, whose copies TensorFlow's policy does not see.
IN_FUNCTIONS = [
    ("f = tf.function(lambda x, y: x * y)\nf(b, c)", 2, {("cpu", B): 32}),
    ("f = tf.function(lambda x: x * v_a)\nfor _ in range(3):\n    f(b)", 3, {(A, B): 96}),
    (
        "f = tf.function(lambda x: tf.reduce_sum(x * v_c))\nwith tf.GradientTape() as tape:\n"
        "    y = f(b)\ntape.gradient(y, v_c)",
        3,
        {("cpu", B): 32},
    ),
]
CLEAN = [
    "b + 1",
    "tf.ones(8) + tf.random.normal((8,)) * b",
    "tf.matmul(tf.reshape(b, (2, 4)), tf.reshape(b, (4, 2)))",
    "tf.reshape(tf.transpose(tf.reshape(b, (2, -1))), [8])",
    "v = tf.Variable(b)\nv.assign_add(b)\nv.assign(2.0 * v)",
    "x = tf.identity(c)\nx + b",
    "with tf.GradientTape() as tape:\n    y = tf.reduce_sum(v_b**2)\ntape.gradient(y, v_b)",
    "f = tf.function(lambda x: tf.reduce_sum(x * v_b))\nfor _ in range(3):\n    f(b)",
    "@tf.function\ndef f(x):\n    while tf.reduce_sum(x) < 100.0:\n        x = 2.0 * x\n"
    "    return x\nf(b)",
    LINEAR + "net(tf.reshape(b, (1, 8)))\nnet.get_weights()",
    LINEAR + FIT + "net.predict(np.ones((4, 8)), verbose=0)",
    LINEAR + "opt = keras.optimizers.Adam()\nwith tf.GradientTape() as tape:\n"
    "    loss = tf.reduce_mean(net(tf.reshape(b, (1, 8))))\n"
    "ws = net.trainable_variables\nopt.apply_gradients(zip(tape.gradient(loss, ws), ws))",
    "class Scale(keras.layers.Layer):\n    def build(self, shape):\n"
    "        self.w = self.add_weight(shape=(8,))\n    def call(self, x):\n"
    "        return x * self.w\nScale()(tf.reshape(b, (1, 8)))",
    "ds = tf.data.Dataset.from_tensor_slices(np.ones((6, 8)))\n"
    "for X in ds.batch(2):\n    tf.identity(X) + 1",
    "tf.linalg.inv(tf.eye(4)) + tf.einsum('i,j->ij', b, b)[:4, :4]",
    "tf.concat([b, b], axis=0)\ntf.split(b, 2)\ntf.stack([b, b])\ntf.pad(b, [[1, 1]])",
    "tf.gather(b, [0, 2])\ntf.one_hot([0, 1], 4) + tf.cast(tf.range(4), tf.float32)",
    "tf.map_fn(lambda x: 2 * x, b)\ntf.cond(True, lambda: b, lambda: 2 * b)",
    "net = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(),\n"
    "    keras.layers.Dropout(0.5)])\nnet(tf.reshape(b, (2, 4)), training=True)",
    "words = tf.constant(['a b', 'c'])\ntf.strings.split(words)",
    "tf.sort(b)\ntf.argmax(b)\ntf.reduce_max(b, axis=0)\nb[2:4]\nb[-1]",
    "keras.layers.LSTM(3)(tf.reshape(b, (1, 4, 2)))",
]  # fmt: skip


@pytest.fixture
def names(names):
    tf, keras = names["tf"], names["keras"]
    with tf.device("/CPU:0"):
        names["rows"] = [tf.ones(8) for _ in range(3)]
        names["where"] = tf.constant([0, 1], dtype=tf.int64)
        names["on_cpu"] = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    yield names
    assert faults.all_kept() == []


def at_line(ran, line):
    found = {}
    for entry in ran.ledger.copies:
        if entry.line == line:
            ends = entry.source, entry.destination
            found[ends] = found.get(ends, 0) + entry.nbytes
    return found


@pytest.fixture
def refused(names):
    """What TensorFlow's own policy says of a cell on GPU 1."""
    tf = names["tf"]

    def run(code):
        tf.config.experimental.set_device_policy("silent_for_int32")
        try:
            with tf.device("/GPU:1"):
                exec(compiled(code), dict(names))
        except tf.errors.InvalidArgumentError as error:
            return "conflicting devices" in str(error)
        finally:
            tf.config.experimental.set_device_policy("silent")
        return False

    return run


@pytest.mark.parametrize(("code", "line", "moved"), SILENT)
def test_a_silent_copy_is_found_by_its_line(counted, refused, code, line, moved):
    ran = counted(code)
    assert ran.error is None
    assert {entry.line for entry in ran.implicit} == {line}
    assert at_line(ran, line) == ran.moved == moved
    assert refused(code)


@pytest.mark.parametrize(("code", "line", "moved"), IN_FUNCTIONS)
def test_a_copy_in_a_function_is_found_where_it_is_called(counted, code, line, moved):
    ran = counted(code)
    assert ran.error is None
    assert at_line(ran, line) == moved
    assert all(entry.operator == "tf.function" for entry in ran.ledger.copies)


@pytest.mark.parametrize("code", CLEAN)
def test_none_is_invented(counted, refused, code):
    ran = counted(code)
    assert ran.error is None
    assert ran.implicit == []
    assert not refused(code)


@pytest.mark.parametrize("code", ["n * b", "tf.multiply(b, n)", "b = b + n", "tf.stack([b, n])"])
def test_an_array_of_numpys_that_an_operator_copies_each_time(counted, code):
    ran = counted(f"for _ in range(3):\n    {code}")
    assert ran.error is None
    assert at_line(ran, 2) == {("cpu", B): 96}
    assert all(entry.implicit for entry in ran.ledger)
    assert isinstance(counted(code, strict=True).error, ImplicitCopyError)


def test_an_array_of_numpys_that_the_code_makes_a_tensor_is_explicit(counted):
    ran = counted("x = tf.constant(n)\ny = tf.convert_to_tensor(n)\nb + x + y\ntf.Variable(n)")
    assert ran.implicit == []


def test_a_copy_that_tensorflow_keeps_counts_once(counted):
    ran = counted("for _ in range(5):\n    b = b + c\n")
    assert [(e.count, e.nbytes) for e in ran.ledger] == [(1, 32)]
    assert ran.ledger.entries[0].seconds is None
    again = counted("b + c")
    assert again.ledger.entries == ()


def test_what_the_host_reads(counted):
    ran = counted("float(b[0])\nb.numpy()\nprint(b)\nb[1].numpy()\nif b[0] > 0:\n    c.numpy()")
    found = [(e.line, e.kind, e.operator, e.implicit, e.via, e.nbytes) for e in ran.ledger]
    assert found == [
        (1, "wait", "float", True, "", 4),
        (2, "copy", "numpy", False, "", 32),
        (3, "copy", "numpy", True, "print", 32),
        (4, "wait", "numpy", False, "", 4),
        (5, "wait", "bool", True, "", 1),
    ]
    assert "1 array printed in 1 read" in ledger_view.line(ran.ledger)


def test_a_copy_that_names_its_device_is_explicit(counted):
    ran = counted("with tf.device('/GPU:1'):\n    x = tf.identity(a)\nx + b")
    assert [(e.line, e.operator, e.implicit) for e in ran.ledger] == [(2, "identity", False)]


def test_batches_are_the_pipelines(counted, names):
    tf = names["tf"]
    names["batches"] = tf.data.Dataset.from_tensor_slices(names["np"].ones((40, 2))).batch(2)
    ran = counted("for X in batches:\n    2 * X", strict=True)
    assert ran.error is None
    [entry] = ran.ledger
    assert (entry.operator, entry.count, entry.nbytes, entry.implicit) == ("batch", 20, 640, False)
    assert "prefetch_to_device('/GPU:1')" in advise(entry).text


def test_placement_by_soft_placement_is_told_by_line(counted):
    ran = counted("x = tf.ones(3)\nwith tf.device('/GPU:7'):\n    w = tf.ones(3)\n    w = 2 * w")
    assert [(e.kind, e.line, e.source, e.destination) for e in ran.ledger] == [
        ("placement", 3, "cuda:7", "cpu"),
        ("placement", 4, "cuda:7", "cpu"),
    ]
    assert "2 results on cpu, not cuda:7" in ledger_view.line(ran.ledger)
    assert ledger_view.hints(ran.ledger)[0].endswith(
        "line 3: asked for GPU:7, but the result is on the CPU: soft placement; "
        "tf.config.set_soft_device_placement(False) makes it an error"
    )
    assert "asked for cuda:7, got cpu (soft placement)" in ledger_view.text(ran.ledger)
    refused = counted("with tf.device('/GPU:7'):\n    w = tf.ones(3)", strict=True)
    assert isinstance(refused.error, ImplicitCopyError)
    assert ", line 2: `tf.ones(3)` is on cpu instead of cuda:7" in str(refused.error)
    assert counted("with tf.device('/CPU:0'):\n    w = tf.ones(3)").ledger.entries == ()


@pytest.mark.parametrize(("code", "line", "moved"), SILENT[:6])
def test_strict_raises_at_the_line(counted, code, line, moved):
    error = counted(code, strict=True).error
    assert isinstance(error, ImplicitCopyError)
    assert re.match(rf"In \[\d+\], line {line}: ", str(error))
    assert "… = tf.identity(…)" in str(error)


def test_strict_leaves_what_is_named(counted):
    code = "x = tf.identity(c)\n(x + b).numpy()\nf = tf.function(lambda y: 2 * y)\nf(b)"
    assert counted(code, strict=True).error is None
    error = counted("if b[0] > 0:\n    pass", strict=True).error
    assert "makes the host wait for cuda:1" in str(error)
    assert "read it first, by .numpy()" in str(error)


def test_advice_is_tensorflows(counted):
    ran = counted(
        "out = []\nfor row in rows:\n    b = b + row\n" + "out.append(float(b[0]))\n" * 16
    )
    said = " ".join(advice.text for advice in map(advise, ran.ledger) if advice)
    assert "with tf.device('/GPU:1'): … = tf.identity(…)" in said
    assert "torch" not in said
    assert "jax" not in said
    code = "out = []\nfor _ in range(20):\n    out.append(float(b[0]))"
    [wait] = counted(code).ledger
    assert advise(wait).text == (
        "leave out on the device, with b[0] in place of float(b[0]), "
        "and read it once after the loop"
    )


def test_what_keras_assigns_itself_is_no_operand_of_the_user(counted, names):
    names["on_cpu"].compile("adam", "mse")
    ran = counted("on_cpu.fit(np.ones((4, 8)), np.ones((4, 4)), verbose=0)", strict=True)
    assert not isinstance(ran.error, ImplicitCopyError)
    copies = [entry for entry in ran.ledger.copies if entry.destination == "cpu"]
    assert copies
    assert {entry.within.split(".")[0] for entry in copies} == {"keras"}
    assert ledger_view.hints(ran.ledger) == []


def test_functions_are_not_traced_anew(counted, names, framework):
    names["traced"] = []
    counted("@tf.function\ndef f(x):\n    traced.append(1)\n    return x + 1")
    assert len(names["traced"]) == 0
    with framework.place(GPUS[1]):
        names["f"](names["b"])
        assert len(names["traced"]) == 1
        for _ in range(2):
            counted("f(b)")
            names["f"](names["b"])
    assert len(names["traced"]) == 1


def test_the_numbers_and_gradients_are_those_without_it(counted, names):
    code = (
        "tf.random.set_seed(7)\nw = tf.Variable(tf.random.normal((8,)))\n"
        "with tf.GradientTape() as tape:\n    y = tf.reduce_sum(tf.sin(w * c))\n"
        "g = tape.gradient(y, w)"
    )
    with names["tf"].device("/GPU:1"):
        exec(code, names)
    plain = names["g"].numpy()
    assert counted(code).names["g"].numpy().tolist() == plain.tolist()


def _patched():
    from tensorflow.python.eager import context, execute
    from tensorflow.python.framework.ops import _EagerTensorBase

    callbacks = len(context.context().op_callbacks)
    return callbacks, execute.execute is execute.quick_execute, _EagerTensorBase._numpy.__module__


def test_nothing_is_left_after_an_error(counted):
    before = _patched()
    assert before[:2] == (0, True)
    assert isinstance(counted("1 / 0").error, ZeroDivisionError)
    assert _patched() == before
    assert counted("tf.matmul(b, b)").error is not None
    assert counted("c + b", strict=True).error is not None
    assert _patched() == before


def test_another_threads_copies_are_its_own(counted, names):
    def read():
        names["b"].numpy()

    names["read"] = read
    names["Thread"] = threading.Thread
    ran = counted("t = Thread(target=read)\nt.start()\nt.join()")
    assert ran.ledger.entries == ()


def test_placed_on_the_cpu_it_says_what_goes_there(counted):
    ran = counted("b + b", where=CPU)
    assert [(e.source, e.destination, e.count, e.nbytes) for e in ran.ledger] == [(B, "cpu", 1, 32)]


def test_what_is_copied_in_silence_has_its_line_also_once(counted):
    assert re.fullmatch(
        r"1 transfer: 32 B to cuda:1 at In \[\d+\], line 1: `b \* c`",
        ledger_view.line(counted("b * c").ledger),
    )
