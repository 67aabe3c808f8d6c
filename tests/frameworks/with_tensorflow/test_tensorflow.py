"""TensorFlow's devices and arrays are gpumagic's: placed, named, brought; the book's code runs."""

import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import GPUS, compiled

import gpumagic
from gpumagic import device
from gpumagic.device import CPU, Device
from gpumagic.errors import GpuError

TENSORFLOWS = """
def cpu():
    return tf.device('/CPU:0')
def gpu(i=0):
    return tf.device(f'/GPU:{i}')
def num_gpus():
    return len(tf.config.experimental.list_physical_devices('GPU'))
def try_gpu(i=0):
    if num_gpus() >= i + 1:
        return gpu(i)
    return cpu()
def try_all_gpus():
    return [gpu(i) for i in range(num_gpus())]
with try_gpu():
    X = tf.ones((2, 3))
with try_gpu(1):
    Y = tf.random.uniform((2, 3))
with try_gpu(1):
    Z = X
with try_gpu(1):
    W = Y + Z
with try_gpu(10):
    C = tf.ones(3)
"""


def test_the_books_code_runs_as_printed(framework, names):
    exec(TENSORFLOWS, names)
    assert names["num_gpus"]() == 2
    assert len(names["try_all_gpus"]()) == 2
    where = {name: framework.where(names[name]) for name in "XYZWC"}
    assert where == {"X": "cuda:0", "Y": "cuda:1", "Z": "cuda:0", "W": "cuda:1", "C": "cpu"}


def test_the_librarys_functions_are_the_books(framework, names):
    code = TENSORFLOWS[TENSORFLOWS.index("with try_gpu():") :]
    names |= {name: getattr(gpumagic, name) for name in ("try_gpu", "try_all_gpus", "num_gpus")}
    exec(code, names)
    assert eval("num_gpus(), len(try_all_gpus())", names) == (2, 2)  # its names say whose
    where = {name: framework.where(names[name]) for name in "XYZWC"}
    assert where == {"X": "cuda:0", "Y": "cuda:1", "Z": "cuda:0", "W": "cuda:1", "C": "cpu"}


def test_an_iterator_that_is_kept_stops_no_counting(framework, names):
    """Its handle is a tensor, of which TensorFlow tells no shape: each later cell failed."""
    exec("kept = iter(tf.data.Dataset.range(3)); X = tf.ones(256)", names)
    assert framework.allocated(CPU)[0] >= 1024
    assert any(each.dtype.name == "resource" for each in framework.live())


def test_a_program_places_and_moves(framework, names):
    names["gpumagic"] = gpumagic
    exec(
        "with gpumagic.on(1):\n    x = tf.ones(3)\nheld = [x]\nmoves = gpumagic.move(held, 0)",
        names,
    )
    assert framework.where(names["x"]) == "cuda:1"
    assert framework.where(names["held"][0]) == "cuda:0"
    with pytest.raises(GpuError, match=r"cannot move a variable.*; nothing was moved"):
        exec("gpumagic.move(tf.Variable(x), 0)", names)


@pytest.mark.parametrize(
    "given",
    ["/GPU:1", "GPU:1", "/gpu:1", "/device:GPU:1", "/job:localhost/replica:0/task:0/device:GPU:1"],
)
def test_a_gpu_is_found_by_each_of_its_spellings(framework, names, given):
    tf = names["tf"]
    with tf.device(given):
        assert framework.where(tf.ones(2)) == "cuda:1"


def test_lists_of_devices_answer_with_the_virtual_gpus(framework, names):
    tf = names["tf"]
    for config in (tf.config, tf.config.experimental):
        assert [d.name for d in config.list_physical_devices("GPU")] == [
            "/physical_device:GPU:0",
            "/physical_device:GPU:1",
        ]
        logical = config.list_logical_devices()
        assert [d.device_type for d in logical] == ["CPU", "GPU", "GPU"]
        for gpu in config.get_visible_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    with tf.device(logical[2]):
        assert framework.where(tf.ones(2)) == "cuda:1"
    assert len(tf.config.list_physical_devices("CPU")) == 1
    with tf.device("/GPU:7"), tf.device(None):
        assert framework.where(tf.ones(2)) == "cpu"


def test_what_stands_in_is_put_back_when_virtual_gpus_go(framework, names):
    tf = names["tf"]
    device.set_virtual(None)
    try:
        assert tf.config.list_physical_devices("GPU") == []
        assert tf.device.__module__.startswith("tensorflow")
        assert not hasattr(tf.device, "__wrapped__")
    finally:
        device.set_virtual(lambda: GPUS)
    assert len(tf.config.list_physical_devices("GPU")) == 2


def test_what_is_made_lands_where_it_is_placed(framework, names):
    tf, keras = names["tf"], names["keras"]
    with framework.place(GPUS[1]):
        made = [tf.ones(3), tf.Variable(1.0), tf.constant([1, 2]), tf.random.normal((2, 2))]
        double = tf.function(lambda x: 2 * x)
        made.append(double(tf.ones(3)))
        made.append(keras.layers.Dense(4))
        made[-1](tf.ones((1, 2)))
        net = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)]
        )
        made.append(net)
        lazy = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
        lazy.compile("adam", "mse")
        lazy.fit(names["np"].ones((8, 3)), names["np"].ones((8, 2)), verbose=0)
        made += [lazy, lazy.optimizer]
    assert {framework.where(each) for each in made} == {"cuda:1"}
    assert framework.where(tf.ones(2)) == "cpu"


def test_a_scope_that_the_cell_leaves_open_does_not_outlive_it(framework, names):
    tf = names["tf"]
    with framework.place(GPUS[1]):
        tf.device("/GPU:0").__enter__()
    assert framework.where(tf.ones(2)) == "cpu"
    with pytest.raises(ValueError, match="mine"), framework.place(GPUS[0]):
        raise ValueError("mine")
    assert framework.where(tf.ones(2)) == "cpu"


def test_tensors_are_brought_and_what_is_bound_says_what_to_type(framework, names):
    tf, keras = names["tf"], names["keras"]
    brought = framework.bring(names["c"], GPUS[1])
    assert framework.where(brought) == "cuda:1"
    assert brought.numpy().tolist() == [1.0] * 8
    assert framework.bring(brought, GPUS[1]) is brought
    with pytest.raises(GpuError, match=r"v = tf\.Variable\(v\)"):
        framework.bring(names["v_c"], GPUS[1])
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    assert framework.is_array(net)
    assert (framework.where(net), framework.nbytes(net)) == ("cpu", 4 * (3 * 4 + 4))
    with pytest.raises(GpuError, match="clone_model"):
        framework.bring(net, GPUS[1])
    module = tf.Module()
    module.v = names["v_c"]
    with pytest.raises(GpuError, match=r"create the variable in this cell$"):
        framework.bring(module, GPUS[1])
    with framework.place(GPUS[1]):  # as it says
        new = keras.models.clone_model(net)
        new.set_weights(net.get_weights())
        v = tf.Variable(names["v_c"])
    assert (framework.where(new), framework.where(v)) == ("cuda:1", "cuda:1")
    assert framework.bring(new, GPUS[1]) is new


def test_what_xla_does_not_reach_is_explained(framework, names):
    code = (
        "with tf.device('/GPU:1'):\n    v = tf.Variable([1.0, 2.0])\n"
        "add = tf.function(lambda a: a + 1, jit_compile=True)\nheld = {'v': v}\n"
        "with tf.device('/GPU:0'):\n    add(held['v'])\n"
    )
    with pytest.raises(names["tf"].errors.InvalidArgumentError) as raised:
        exec(compiled(code), names)
    text = _advice(raised.value)
    assert "line 6: add(held['v'])" in text
    assert "run the code in a cell of %%ongpu cuda:1" in text
    assert "ran the code on cuda:0" in text
    assert gpumagic.explain(ValueError("another")) is None


def _advice(error):
    return " ".join(str(gpumagic.explain(error)).split())  # lines are wrapped


def test_a_failed_fit_is_followed_by_advice_that_works(framework, names):
    """The failed `fit` creates the optimizer's variables on GPU 1. The model's are on the CPU."""
    tf = names["tf"]
    make = (
        "net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])\n"
        "x, y = np.ones((8, 8)), np.ones((8, 2))\n"
    )
    compiling, fit = "net.compile('adam', 'mse')\n", "net.fit(x, y, verbose=0)\n"
    exec(compiled(make + compiling), names)
    for where in (GPUS[1], CPU):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised, framework.place(where):
            exec(compiled(fit), names)
        said = _advice(raised.value)
        assert f"ran the code on {where}" in said
        assert (
            "run the code in a cell of %%ongpu cpu, after compile(…) with a new optimizer there, or"
            in said
        )
        assert "there, or without XLA: compile(…, jit_compile=False)" in said
    with framework.place(GPUS[1]):
        exec(compiled(compiling.replace("'mse'", "'mse', jit_compile=False") + fit), names)
    with framework.place(CPU):
        exec(compiled(compiling + fit), names)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised, framework.place(GPUS[1]):
        exec(compiled("net.predict(x, verbose=0)"), names)
    assert "run the code in a cell of %%ongpu cpu, or without XLA" in _advice(raised.value)
    with framework.place(GPUS[1]):
        exec(compiled(make), names)
    exec(compiled(compiling), names)  # the learning rate and the metrics are on the CPU
    with pytest.raises(tf.errors.InvalidArgumentError) as raised, framework.place(GPUS[1]):
        exec(compiled(fit), names)
    assert "in a cell of %%ongpu cuda:1, after compile(…) with a" in _advice(raised.value)
    with framework.place(GPUS[1]):
        exec(compiled(compiling + fit), names)


def test_a_model_on_two_devices_runs_without_xla(framework, names):
    make = "net = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(3)])\n"
    build = "net.layers[{}].build((8, {}))\n"
    exec(compiled(make + build.format(0, 4)), names)
    with framework.place(GPUS[1]):
        exec(compiled(build.format(1, 2)), names)
    fit = "net.compile('sgd', 'mse'{})\nnet.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)\n"
    with pytest.raises(names["tf"].errors.InvalidArgumentError) as raised:
        exec(compiled(fit.format("")), names)
    said = _advice(raised.value)
    assert "other devices: run it without XLA: compile(…, jit_compile=False)" in said
    exec(compiled(fit.format(", jit_compile=False")), names)


def test_what_is_no_array_of_its_own(framework, names):
    tf, keras = names["tf"], names["keras"]
    pipeline = tf.data.Dataset.range(3)
    assert not any(map(framework.is_array, framework.parts(pipeline)[0]))
    for value in (
        names["n"],
        1.0,
        pipeline,
        [names["a"]],
        keras.layers.Dense(3),
        tf.float32,
        tf,
        tf.Tensor,
    ):
        assert not framework.is_array(value)
    inside = []
    tf.function(lambda x: inside.append(framework.is_array(x)))(names["a"])
    assert inside == [False]


def test_ragged_and_sparse_tensors_are_made_of_their_parts(framework, names):
    tf = names["tf"]
    for value in (tf.ragged.constant([[1, 2], [3]]), tf.sparse.from_dense([[0.0, 1], [2, 0]])):
        held, make = framework.parts(value)
        made = make([framework.bring(part, GPUS[0]) for part in held])
        assert {framework.where(part) for part in framework.parts(made)[0]} == {"cuda:0"}
        same = (
            made.to_list() == value.to_list() if hasattr(made, "to_list") else made.shape == (2, 2)
        )
        assert same
    assert framework.parts([names["a"]]) is None


def test_copies_are_of_their_own(framework, names):
    keras, np = names["keras"], names["np"]
    variable = framework.copy(names["v_c"], GPUS[0])
    variable.assign_add(names["tf"].ones(8))
    assert names["v_c"].numpy().tolist() == [1.0] * 8
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    net.compile("sgd", "mse")
    before = net.get_weights()[0].copy()
    copy = framework.copy(net, GPUS[1])
    with framework.place(GPUS[1]):
        copy.fit(np.ones((8, 3)), np.ones((8, 4)), verbose=0)
    assert framework.where(copy) == "cuda:1"
    assert np.array_equal(net.get_weights()[0], before)


def test_bytes_by_device(framework, names):
    tf = names["tf"]
    before = framework.allocated(GPUS[1])
    with framework.place(GPUS[1]):
        kept = tf.ones(1000)
    framework.wait()
    assert framework.allocated(GPUS[1]) == (before[0] + 4000, None)
    assert framework.nbytes(kept) == 4000
    assert any(each is kept for each in framework.live())
    net = names["keras"].Sequential([names["keras"].Input((3,)), names["keras"].layers.Dense(4)])
    places = framework.places(kept) + framework.places(net)
    assert [(p.device, p.nbytes) for p in places] == [("cuda:1", 4000), ("cpu", 48), ("cpu", 16)]
    assert all(
        a.address + a.nbytes <= b.address
        for a, b in pairwise(sorted(places))
        if a.device == b.device
    )
    assert framework.pool(GPUS[1]) is None
    assert framework.pool(Device("cuda", 9)) is None  # TensorFlow does not use it
    assert framework.nbytes(tf.constant(["words"])) == 0


def test_devices_are_those_of_here(framework):
    assert framework.devices() == GPUS
    with pytest.raises(GpuError, match="a GPU's number"):
        framework.place(Device("mps")).__enter__()


def test_too_late_is_one_line_that_says_what_to_type(framework, names):
    framework.make_virtual(2)  # as many as there are: nothing to do
    with pytest.raises(GpuError) as raised:
        framework.make_virtual(3)
    said = str(raised.value)
    assert "TensorFlow has started in this kernel with 3 CPU devices: restart the kernel" in said
    assert "%gpus --virtual 3" in said
    device.set_virtual(lambda: [*GPUS, Device("cuda", 2, virtual=True)])
    try:
        with pytest.raises(GpuError, match="restart the kernel"):
            framework.place(Device("cuda", 2, virtual=True)).__enter__()
    finally:
        device.set_virtual(lambda: GPUS)
    with framework.place(CPU):
        assert framework.where(names["tf"].ones(1)) == "cpu"


STARTS = """
import sys
from gpumagic import device
from gpumagic.device import Device
from gpumagic.frameworks.tensorflow_framework import TensorFlow
from tensorflow.python.eager import context
framework = TensorFlow()
framework.make_virtual(1)
framework.make_virtual(2)
gpus = [Device("cuda", k, virtual=True) for k in range(2)]
device.set_virtual(lambda: gpus)
assert len(framework.devices()) == 2
import tensorflow as tf
assert len(tf.config.list_physical_devices("GPU")) == 2
assert len(tf.config.list_logical_devices("GPU")) == 2
assert not context.context()._initialized, "it has started"
assert "torch" not in sys.modules
"""


def test_nothing_starts_before_it_is_used(framework):
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_keras_trains_recurrent_networks_without_cudnn(names, kind):
    tf, keras, np = names["tf"], names["keras"], names["np"]
    layer = getattr(keras.layers, kind)(4)
    with tf.device("/GPU:1"):
        net = keras.Sequential([keras.Input((5, 3)), keras.layers.Bidirectional(layer)])
        net.add(keras.layers.Dense(1))
        net.compile("sgd", "mse")
        history = net.fit(np.ones((8, 5, 3)), np.ones((8, 1)), epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_keras_convolves_channels_first_as_on_a_cpu(names):
    keras, np = names["keras"], names["np"]
    layer = keras.layers.Conv2D(2, 3, data_format="channels_first")
    assert layer(np.ones((1, 3, 8, 8), np.float32)).shape == (1, 2, 6, 6)
