"""Encoders of pictures and vectors, against the layers they are made of."""

import pytest
import torch
from torch.nn import functional

from sf_torchrl import ActorCritic
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.spaces import ActionSpec, EnvSpecs
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.encoders import Encoder
from sf_torchrl.models.network import ActorCriticNetwork

PARTS = "models.own_parts"
FP32 = {"precision": "float32"}


def picture(shape=(3, 72, 128), key=("observation",), dtype="uint8"):
    return Feature(key, dtype, shape)


def specs(*features):
    action = ActionSpec(kind="discrete", n=4)
    return EnvSpecs(name="an env", observation=features, action=action, is_dict=True)


def policy_for(*features, **layers):
    torch.manual_seed(0)
    return ActorCritic(specs(*features), NetworkConfig(**layers))


def pictures(count, shape=(3, 72, 128)):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


CONVNETS = {
    # Sample Factory's layers, and the numbers that come out for 4x84x84 pictures.
    "convnet_simple": ([(32, 8, 4), (64, 4, 2), (128, 3, 2)], 2048),
    "convnet_impala": ([(16, 8, 4), (32, 4, 2)], 2592),
    "convnet_atari": ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 3136),
}


@pytest.mark.parametrize("name", CONVNETS)
def test_a_convnet_has_sample_factorys_layers(name):
    layers, num_features = CONVNETS[name]
    encoder = Encoder([picture((4, 84, 84))], NetworkConfig(encoder_conv_architecture=name))
    body = encoder.parts[0].body
    found = [
        (conv.out_channels, conv.kernel_size[0], conv.stride[0])
        for conv in body.convolutions.layers
    ]
    assert found == layers
    (linear,) = body.mlp.layers
    assert (linear.in_features, linear.out_features) == (num_features, 512)
    assert encoder.num_outputs == 512


def test_the_resnet_has_impalas_stages():
    config = NetworkConfig(encoder_conv_architecture="resnet_impala")
    body = Encoder([picture((4, 84, 84))], config).parts[0].body
    convolutions = [m for m in body.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 15
    assert [c.out_channels for c in convolutions[::5]] == [16, 32, 32]
    assert body.mlp.layers[0].in_features == 32 * 11 * 11


@pytest.mark.parametrize("nonlinearity", ["elu", "relu", "tanh"])
def test_a_picture_is_scaled_and_goes_through_every_layer(nonlinearity):
    """Against torch's own functions, one after the other."""
    config = NetworkConfig(nonlinearity=nonlinearity, encoder_conv_mlp_layers=(32, 16))
    encoder, x = Encoder([picture()], config), pictures(5)
    body = encoder.parts[0].body
    activation = getattr(torch, nonlinearity, None) or getattr(functional, nonlinearity)
    y = x.float() / 255
    for conv in body.convolutions.layers:
        y = activation(functional.conv2d(y, conv.weight, conv.bias, conv.stride))
    y = y.flatten(1)
    for linear in body.mlp.layers:
        y = activation(functional.linear(y, linear.weight, linear.bias))
    torch.testing.assert_close(encoder([x]), y, atol=1e-5, rtol=1e-4)


def test_the_order_of_channels_changes_nothing():
    first = policy_for(picture((3, 72, 128)), **FP32)
    last = policy_for(picture((72, 128, 3)), **FP32)
    x = pictures(6)
    for one, other in zip(
        first.evaluate([x]), last.evaluate([x.permute(0, 2, 3, 1).contiguous()]), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_the_size_of_a_piece_changes_neither_result_nor_gradient(rows):
    whole = policy_for(picture(), rows_per_piece=1000, **FP32)
    cut = policy_for(picture(), rows_per_piece=rows, **FP32)
    x = pictures(17)
    for policy in (whole, cut):
        params, value = policy.evaluate([x])
        (params.square().mean() + value.square().mean()).backward()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
    for one, other in zip(whole.evaluate([x]), cut.evaluate([x]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_picture_of_floats_is_taken_as_it_is():
    feature = picture((3, 40, 40), dtype="float32")
    encoder, x = Encoder([feature], NetworkConfig()), torch.randn(2, 3, 40, 40)
    body = encoder.parts[0].body
    torch.testing.assert_close(encoder([x]), body(x))


def test_bytes_of_a_picture_are_scaled_and_not_normalized():
    policy = policy_for(picture(), picture((2,), ("health",), "float32"))
    assert policy.normalizer.active
    assert [type(part).__name__ for part in policy.normalizer.parts] == [
        "Identity",
        "RunningMeanStd",
    ]
    policy.normalizer.update([pictures(4), torch.full((4, 2), 100.0)], None)
    assert not policy_for(picture()).normalizer.active


def test_every_observation_has_an_encoder_of_its_own():
    features = (
        picture((3, 40, 40), ("screen",)),
        picture((2,), ("health",), "float32"),
        picture((), ("time",), "float32"),
    )
    encoder = Encoder(
        features, NetworkConfig(encoder_mlp_layers=(7,), encoder_conv_mlp_layers=(5,))
    )
    found = encoder([pictures(3, (3, 40, 40)), torch.randn(3, 2), torch.randn(3)])
    assert found.shape == (3, 5 + 7 + 7)
    assert encoder.num_outputs == 19


def test_encoders_and_decoder_may_be_the_users_own():
    policy = policy_for(
        picture((40, 40, 3), ("screen",)),
        picture((2,), ("health",), "float32"),
        encoders={"screen": f"{PARTS}.Mean", "health": f"{PARTS}.Sum"},
        decoder=f"{PARTS}.Half",
        normalize_input=False,
        **FP32,
    )
    torso, x = policy.network.torso, pictures(3, (40, 40, 3))
    found = torso([x, torch.tensor([[1.0, 2.0]] * 3)])
    assert torso.num_outputs == 2
    torch.testing.assert_close(found, (x.float() / 255).mean((1, 2))[:, :2])


def test_one_key_may_have_another_architecture():
    features = picture((4, 84, 84), ("a",)), picture((4, 84, 84), ("b",))
    encoder = Encoder(features, NetworkConfig(encoders={"b": "convnet_impala"}))
    assert [len(part.body.convolutions.layers) for part in encoder.parts] == [3, 2]


@pytest.mark.parametrize(
    ("initialization", "gain"), [("orthogonal", 1.0), ("orthogonal", 2.0), ("xavier_uniform", 1.0)]
)
def test_convolutions_are_initialized_as_configured(initialization, gain):
    policy = policy_for(picture(), policy_initialization=initialization, policy_init_gain=gain)
    conv = policy.network.torso.encoder.parts[0].body.convolutions.layers[0]
    weight = conv.weight.detach().flatten(1)
    assert not conv.bias.any()
    if initialization == "orthogonal":
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(32), atol=1e-5, rtol=0)
    else:
        fan = (3 + 32) * 64
        assert weight.abs().max() == pytest.approx((6 / fan) ** 0.5, rel=0.02)


@pytest.mark.parametrize("part", ["rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0"])
def test_cores_are_initialized_as_torch_does(part):
    policy = policy_for(picture((4,), dtype="float32"), core="gru", rnn_size=64)
    weight = policy.network.torso.core.get_parameter(part).detach()
    assert weight.abs().max() == pytest.approx(64**-0.5, rel=0.05)


REFUSED = {
    "cubes": (
        picture((30, 30, 30)),
        {},
        r"'observation' of shape \(30, 30, 30\) does not tell height, width and channels apart; "
        "set network.channel_order",
    ),
    "too small": (
        picture((3, 20, 128)),
        {},
        "height 20 and width 128 is too small for convnet_simple",
    ),
    "no picture": (
        picture((4,), dtype="float32"),
        {"encoders": {"observation": "convnet_atari"}},
        "needs a picture, an observation of three dimensions",
    ),
    "no such key": (picture(), {"encoders": {"sreen": "mlp"}}, r"encoders names \['sreen'\]"),
    "no such module": (picture(), {"encoders": {"observation": "no.such.Net"}}, "cannot be made"),
    "no such class": (picture(), {"decoder": f"{PARTS}.Hallf"}, "cannot be made"),
    "another signature": (picture(), {"encoders": {"observation": f"{PARTS}.Picky"}}, "'more'"),
    "no module at all": (picture(), {"encoders": {"observation": ".Foo"}}, "cannot be made"),
    "no outputs": (picture(), {"encoders": {"observation": f"{PARTS}.Forgetful"}}, "num_outputs"),
}


@pytest.mark.parametrize(("feature", "layers", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(feature, layers, message):
    with pytest.raises(ValueError, match=message):
        policy_for(feature, **layers)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"encoder_conv_architecture": "resnet"}, "must be one of convnet_simple"),
        ({"core": "rnn"}, "must be one of none, gru, lstm"),
        ({"decoder": "mpl"}, "must be one of mlp, or package.module.Class"),
        ({"encoders": {"x": "convnet"}}, r"encoders\['x'\]='convnet' must be one of mlp"),
        ({"encoder_mlp_layers": (8.5,)}, "must be positive integers"),
        ({"policy_init_gain": -1.0}, "policy_init_gain=-1.0"),
        ({"rnn_size": 0}, "rnn_size=0 must be at least 1"),
        ({"rows_per_piece": -1}, "rows_per_piece=-1"),
        ({"precision": "half"}, "must be one of auto, float32, bfloat16"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        NetworkConfig(**setting)


def test_a_cube_is_a_picture_where_the_order_is_said():
    for order in ("first", "last"):
        policy = policy_for(picture((40, 40, 40)), channel_order=order)
        assert policy.evaluate([pictures(2, (40, 40, 40))])[1].shape == (2,)


def test_the_mlp_flattens_what_is_no_picture():
    policy = policy_for(picture((5, 3), dtype="float32"))
    assert policy.evaluate([torch.randn(2, 5, 3)])[1].shape == (2,)


def test_a_network_of_pictures_can_be_sent_to_another_process():
    import cloudpickle

    policy = policy_for(picture((3, 40, 40)), core="lstm", rnn_size=8)
    network = cloudpickle.loads(cloudpickle.dumps(policy.network))
    assert isinstance(network, ActorCriticNetwork)
    rows, state = [pictures(2, (3, 40, 40))], torch.zeros(2, 16)
    for one, other in zip(
        policy.network.act(rows, False, state), network.act(rows, False, state), strict=True
    ):
        assert torch.equal(one, other)


def test_parts_of_the_users_own_keep_their_weights():
    policy = policy_for(
        picture((4,), dtype="float32"), encoders={"observation": f"{PARTS}.Trained"}
    )
    (encoder,) = policy.network.torso.encoder.parts
    assert (encoder.body.linear.weight == 0.5).all()


def test_an_mlp_on_a_picture_sees_it_scaled():
    policy = policy_for(
        picture((3, 10, 10)), encoders={"observation": "mlp"}, encoder_mlp_layers=(8,), **FP32
    )
    (encoder,) = policy.network.torso.encoder.parts
    x = pictures(2, (3, 10, 10))
    (layer,) = encoder.body.layers
    expected = functional.elu(functional.linear(x.flatten(1) / 255, layer.weight, layer.bias))
    torch.testing.assert_close(encoder(x), expected)


def test_a_torso_with_an_attribute_of_our_name_is_not_recurrent():
    class Own(torch.nn.Module):
        num_outputs, state_size = 4, 7

        def forward(self, observations):
            return observations[0]

    policy = ActorCritic(specs(picture((4,), dtype="float32")), torso=Own())
    assert policy.state is None
