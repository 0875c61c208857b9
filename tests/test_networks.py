from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from mindspore import Tensor, nn, ops
from policy_helpers import numerical_gradient, spec_of
from scipy.signal import correlate

from msrl_accel.errors import ConfigError
from msrl_accel.networks import CNN, MLP, Dense, EnsembleDense, FixedBatchEnsembleDense, orthogonal

pytestmark = pytest.mark.usefixtures("graph_mode")


class Apply(nn.Cell):
    """A network with its weights as separate arguments."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, *weights):
        return self.network(x, weights)


class WeightedSum(nn.Cell):
    """A scalar of a layer's output."""

    def __init__(self, layer, coefficients):
        super().__init__()
        self.layer = layer
        self.coefficients = tensor(coefficients)

    def construct(self, x, weight, bias):
        return (self.layer(x, weight, bias) * self.coefficients).sum()


def tensor(x):
    return Tensor(np.ascontiguousarray(x, np.float32))


def random_weights(network, rng):
    return [rng.normal(size=s.shape) * 0.3 for s in network.weight_specs("w")]


def test_dense_equals_a_matrix_product_and_so_do_its_gradients():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((4, 3), (2, 3), (2,))]
    coefficients = rng.normal(size=(4, 2))

    def forward(x, weight, bias):
        return x @ weight.T + bias

    np.testing.assert_allclose(
        Dense()(*map(tensor, arrays)).asnumpy(), forward(*arrays), rtol=1e-5, atol=1e-6
    )
    check_gradients(Dense(), forward, arrays, coefficients)


@pytest.mark.parametrize("layer", [EnsembleDense, FixedBatchEnsembleDense])
def test_ensemble_dense_is_one_dense_a_member_and_so_are_its_gradients(layer):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((2, 4, 3), (2, 5, 3), (2, 1, 5))]
    coefficients = rng.normal(size=(2, 4, 5))
    result = layer()(*map(tensor, arrays)).asnumpy()
    np.testing.assert_array_equal(result, EnsembleDense()(*map(tensor, arrays)).asnumpy())
    dense = Dense()
    for k in range(2):
        x, weight, bias = (a[k] for a in arrays)
        member = dense(tensor(x), tensor(weight), tensor(bias[0])).asnumpy()
        np.testing.assert_allclose(result[k], member, rtol=1e-5, atol=1e-6)
    check_gradients(
        layer(),
        lambda x, weight, bias: np.einsum("mbi,moi->mbo", x, weight) + bias,
        arrays,
        coefficients,
    )


def check_gradients(layer, forward, arrays, coefficients):
    graph = WeightedSum(layer, coefficients)
    gradients = ops.grad(graph, (0, 1, 2))(*map(tensor, arrays))
    for i, gradient in enumerate(gradients):

        def scalar(x, i=i):
            changed = [x if j == i else a for j, a in enumerate(arrays)]
            return (forward(*changed) * coefficients).sum()

        expected = numerical_gradient(scalar, arrays[i])
        assert gradient.shape == arrays[i].shape
        np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("members", [1, 3])
def test_an_mlp_equals_matrix_products(activation, members):
    rng = np.random.default_rng(1)
    network = MLP(3, (5, 4), activation, members)
    weights = random_weights(network, rng)
    x = rng.normal(size=(6, 3))
    outputs = Apply(network)(tensor(x), *map(tensor, weights))
    assert len(outputs) == members
    assert network.outputs == 4
    act = np.tanh if activation == "tanh" else lambda a: np.maximum(a, 0)
    for k, output in enumerate(outputs):
        w0, b0, w1, b1 = weights if members == 1 else [w[k] for w in weights]
        expected = act(act(x @ w0.T + b0) @ w1.T + b1)
        np.testing.assert_allclose(output.asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_an_mlp_without_hidden_layers_is_the_identity():
    network = MLP(3, (), "tanh", 2)
    x = np.arange(6.0).reshape(2, 3)
    outputs = Apply(network)(tensor(x))
    assert network.weight_specs("w") == []
    assert network.outputs == 3
    for output in outputs:
        np.testing.assert_array_equal(output.asnumpy(), x)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (4, 4), (1, 7)])
def test_initial_weights_are_orthogonal(rows, columns):
    gain = np.sqrt(2.0)
    matrices = orthogonal(rows, columns, gain, members=2)(np.random.default_rng(0))
    assert matrices.shape == (2, rows, columns)
    assert not np.allclose(matrices[0], matrices[1])
    for w in matrices:
        product = w.T @ w if rows >= columns else w @ w.T
        np.testing.assert_allclose(product, gain**2 * np.eye(min(rows, columns)), atol=1e-12)


def test_layers_start_with_the_stated_gain_and_zero_biases():
    rng = np.random.default_rng(0)
    for spec in MLP(6, (4, 4), "tanh", 2).weight_specs("torso"):
        value = spec.initial(rng)
        assert value.dtype == np.float32
        assert value.shape == spec.shape
        if spec.name.endswith("bias"):
            assert not value.any()
        else:
            for w in value:
                np.testing.assert_allclose(w @ w.T, 2 * np.eye(4), atol=1e-5)


def reference_cnn(image, weights, strides):
    """Features of one image [C, H, W] in [0, 1] by SciPy's correlation."""
    x = image
    for i, stride in enumerate(strides):
        kernels, bias = weights[2 * i], weights[2 * i + 1]
        maps = [correlate(x, k, mode="valid")[0] + b for k, b in zip(kernels, bias)]
        x = np.maximum(np.stack(maps)[:, ::stride, ::stride], 0)
    return np.maximum(weights[-2] @ x.reshape(-1) + weights[-1], 0)


@pytest.mark.parametrize(
    ("shape", "outputs", "strides"),
    [
        ((9, 8, 2), 128, (1, 2)),
        ((2, 8, 9), 128, (1, 2)),
        ((10, 11), 128, (1, 2)),
        ((40, 36, 1), 512, (4, 2, 1)),
    ],
)
def test_a_cnn_equals_scipys_correlation(shape, outputs, strides):
    (observation,) = spec_of(spaces.Discrete(2), spaces.Box(0, 255, shape, np.uint8)).observations
    network = CNN(observation)
    assert network.outputs == outputs
    rng = np.random.default_rng(2)
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (2, *shape), dtype=np.uint8)
    result = Apply(network)(Tensor(images), *map(tensor, weights)).asnumpy()
    for image, features in zip(images / 255.0, result):
        if image.ndim == 2:
            image = image[None]
        elif shape[0] > shape[2]:
            image = image.transpose(2, 0, 1)
        expected = reference_cnn(image, weights, strides)
        np.testing.assert_allclose(features, expected, rtol=1e-3, atol=1e-3 * expected.max())


def test_convolutions_start_orthogonal():
    space = spaces.Box(0, 255, (9, 8, 2), np.uint8)
    specs = CNN(spec_of(spaces.Discrete(2), space).observations[0]).weight_specs("cnn")
    kernels = specs[0].initial(np.random.default_rng(0)).reshape(16, -1)
    np.testing.assert_allclose(kernels @ kernels.T, 2 * np.eye(16), atol=1e-5)


def test_an_image_too_small_for_the_layers_is_named():
    class Narrow:
        name, shape, hwc, channels_first = "camera", (3, 2, 1), (3, 2, 1), False

    with pytest.raises(ConfigError, match=r"'camera'.*too small"):
        CNN(Narrow())
