"""The study of what underflows below the ceiling: its losses are right, and the pages say what its data say."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.lab.measures import FREE_BITS
from scripts.studies import harm, harm_trainings
from scripts.studies.reporting import ROOT
from tests.shared.pages import figure


@pytest.fixture(scope="module")
def data():
    return figure("harm")


def most(data, key, bits):
    column = data["bits"].index(bits)
    return {name: harm.most(rows, key)[column] for name, rows in data["trainings"].items()}


class TwoWeights(nn.Cell):
    """A network whose weights have the gradients 1 and 3 * 2^-12 in FP16, each as an element of a product."""

    def __init__(self):
        super().__init__()
        self.large = nn.Dense(1, 1, "ones", has_bias=False)
        self.small = nn.Dense(1, 1, "ones", has_bias=False)

    def construct(self, x):
        half = x.astype("float16")
        large = self.large.weight.astype("float16") * half[0]
        small = self.small.weight.astype("float16") * half[1]
        return (large + small).astype("float32").sum()


def test_losses_of_a_network_with_known_gradients(graph_mode):
    network = TwoWeights()
    train_step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.0))
    batch = (Tensor(np.float32([1.0, 3 * 2.0**-12])),)
    training = harm_trainings.Training(train_step, lambda step: batch)
    [row] = harm.losses(training, steps=(0,))
    # The larger gradient is 1, so 2^15 fits into FP16 and 2^16 does not.
    assert row["ceilings"] == [15] * harm.BATCHES
    for bits, lost, worst in zip(harm.BITS, row["lost"], row["worst"], strict=True):
        small = 3 * 2.0 ** (15 - bits - 12)
        # Below 2^-24, FP16 has no number. Round half to even.
        error = abs(np.float64(np.float16(small)) - small)
        assert worst == pytest.approx(error / small, rel=1e-2)
        assert lost == pytest.approx(error / np.hypot(2.0 ** (15 - bits), small), rel=1e-2)


def test_free_bits_end_before_the_first_share_above_0001():
    assert harm.free_bits([0, 2, 4, 6], [0.0, 0.0005, 0.001, 0.002]) == 4
    # A share that falls again makes no lower scale free.
    assert harm.free_bits([0, 2, 4, 6], [0.0, 0.002, 0.0005, 0.002]) == 0


def test_what_is_lost_at_some_bits_is_interpolated(data, monkeypatch):
    rows = [
        {"lost": [0.0, 0.01, 0.05], "worst": [0.0, 0.1, 0.2]},
        {"lost": [0.0, 0.02, 0.04], "worst": [0.0, 0.1, 0.2]},
    ]
    monkeypatch.setattr(harm, "_measured", lambda: {"bits": [0, 2, 4], "trainings": {"one": rows}})
    shown = [harm.lost_at("one", bits) for bits in (-1.0, 1.0, 3.0, 4.0, 5.0, None)]
    assert shown == [
        "below 0.0001 %; below 0.0001 %",
        "1 %; 5 %",
        "3.5 %; 15 %",
        "5 %; 20 %",
        "over 5 %; over 20 %",
        "-",
    ]
    assert harm.lost_at("another", 3.0) == "-"


def test_data_are_of_all_trainings_of_the_script(data):
    assert list(data["trainings"]) == list(harm.TRAININGS)
    assert data["bits"] == list(harm.BITS)
    for rows in data["trainings"].values():
        assert [row["step"] for row in rows] == list(harm.STEPS)
        assert {len(row["ceilings"]) for row in rows} == {harm.BATCHES}


def test_the_pages_say_what_the_data_say(data):
    _, *rows, every = harm.tables(data)["lost"]
    free = int(every[-1])
    assert free == min(int(row[-1]) for row in rows) == FREE_BITS
    assert max(most(data, "lost", 18).values()) > harm.FREE
    assert max(most(data, "lost", 18), key=most(data, "lost", 18).get).startswith("the demo's Llama")
    assert max(most(data, "lost", 2).values()) <= 4e-5
    worst = most(data, "worst", 16)
    assert max(worst[name] for name in worst if name != "moving ceiling") == worst["DeepSeek-V3 with experts"]
    assert round(worst["DeepSeek-V3 with experts"], 2) == 0.07
    assert most(data, "worst", 4)["moving ceiling"] > 0.2
    llama, divided = (data["trainings"][name][0] for name in list(harm.TRAININGS)[:2])
    assert divided["lost"] == llama["lost"]
    assert np.subtract(divided["ceilings"], llama["ceilings"]).tolist() == [8] * harm.BATCHES
    for language, said in (
        ("en", f"{free} bits below the ceiling are free"),
        ("zh", f"低于上限{free} bit以内没有代价"),
    ):
        assert said in (ROOT / "docs" / language / "evidence.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["damped output", "policy gradient"])
def test_the_start_of_a_training_is_as_in_the_data(graph_mode, data, name):
    build, *arguments = harm.TRAININGS[name]
    [row] = harm.losses(getattr(harm_trainings, build)(*arguments), steps=(0,))
    expected = data["trainings"][name][0]
    np.testing.assert_allclose(row["ceilings"], expected["ceilings"], atol=1)
    # Shares below a millionth differ between machines, which add up in another order.
    np.testing.assert_allclose(row["lost"], expected["lost"], rtol=0.5, atol=1e-6)


def test_the_experts_of_a_cpu_are_those_that_the_router_chooses(graph_mode):
    for model in ("deepseek3.modeling_deepseek_v3_train", "qwen3.modeling_qwen3_train"):
        pytest.importorskip(f"mindformers.models.{model}")
    from scripts.studies.mcore_on_cpu import experts_on_cpu

    random = np.random.default_rng(0)
    tokens, weights = random.standard_normal((1, 5, 4)), random.random((1, 5, 2))
    chosen = np.array([[[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]]], np.int32)
    first, second = random.standard_normal((3, 4, 6)), random.standard_normal((3, 3, 4))
    layer = type("Layer", (), {"hidden_size": 4, "moe_ffn_hidden_size": 3, "num_local_experts": 3})()
    arrays = [Tensor(array.astype(np.float32)) for array in (tokens, weights)]
    flat = [Tensor(array.reshape(-1, array.shape[-1]).astype(np.float32)) for array in (first, second)]
    output = experts_on_cpu(layer, *arrays, Tensor(chosen), *flat).asnumpy()
    for token, experts, parts, value in zip(tokens[0], chosen[0], weights[0], output[0], strict=True):
        expected = 0.0
        for expert, part in zip(experts, parts, strict=True):
            gate, hidden = np.split(token @ first[expert], 2)
            expected = expected + part * ((gate / (1 + np.exp(-gate)) * hidden) @ second[expert])
        np.testing.assert_allclose(value, expected, rtol=1e-4)
