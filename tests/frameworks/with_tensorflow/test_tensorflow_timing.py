"""TensorFlow in a comparison: copies and the same random numbers on each device."""

from gpumagic.timing import compare


def test_each_device_has_the_inputs_and_the_same_numbers(framework):
    import tensorflow as tf

    w = tf.Variable(tf.ones(4))

    @tf.function
    def step(x):
        return x * w + tf.random.normal((4,))

    names = {"__name__": "__main__", "tf": tf, "w": w, "step": step, "x": tf.ones(4)}
    tf.random.set_seed(3)
    tf.random.normal((1,))
    code = "w.assign_add(x)\ny = step(x) + tf.random.normal((4,))"
    made = compare(code, ["cpu", "0", "1"], namespace=names, max_time=0.02)
    drawn = tf.random.normal((1,)).numpy()
    assert [t.error for t in made.timings] == [None] * 3
    assert [t.virtual for t in made.timings] == [False, True, True]
    assert [a.same for a in made.agreements] == [True, True]
    assert all(t.first is not None for t in made.timings)
    assert w.numpy().tolist() == [1.0] * 4
    tf.random.set_seed(3)
    tf.random.normal((1,))
    assert tf.random.normal((1,)).numpy() == drawn
