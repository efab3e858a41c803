"""Every argument of every public class survives a round trip, changes something, and is refused where it is wrong."""

import inspect

import keras
import pytest
from keras import ops

from keras_transformer.layers import TokenEmbedding, TransformerDecoder, TransformerDecoderBlock
from keras_transformer.models import Encoder
from tests.arguments import (
    ARGUMENTS,
    CALL_ARGUMENTS,
    MEMORY_PADDING,
    OBSERVED,
    D,
    E,
    X,
    base_of,
    built,
    calls_of,
    json_copy,
    observe,
    observed_by,
    parameters_of,
    plain,
    public_classes,
    same,
    toy,
    variants,
    with_argument,
)
from tests.forms import flat

# Configurations are Keras' affair; the layers' values have tests of their own on every backend.
pytestmark = pytest.mark.once("jax")


class TestRoundTrips:
    """An argument that `get_config` forgets."""

    def test_every_public_class_is_registered_and_has_arguments_here(self):
        registered = {
            name.partition(">")[2]: cls
            for name, cls in keras.saving.get_custom_objects().items()
            if name.startswith("keras_transformer>") and inspect.isclass(cls)
        }
        assert registered == {cls.__name__: cls for cls in public_classes()}
        assert set(registered) == {cls.__name__ for cls in ARGUMENTS}
        for cls, arguments in ARGUMENTS.items():
            assert set(arguments) == set(parameters_of(cls)), cls

    @pytest.mark.parametrize("cls, name", [(cls, name) for cls in ARGUMENTS for name in ARGUMENTS[cls]])
    def test_every_argument_survives(self, cls, name):
        _, changed = variants(cls, name)
        instance = cls(**changed)
        config = instance.get_config()
        default = parameters_of(cls)[name].default if name in parameters_of(cls) else None
        assert changed[name] != default
        copies = [cls.from_config(config), keras.saving.deserialize_keras_object(json_copy(instance))]
        for copy in copies:
            assert type(copy) is cls
            assert copy.get_config() == config
            assert plain(getattr(copy, name)) == plain(getattr(instance, name))
        assert plain(config[name]) != plain(cls(**variants(cls, name)[0]).get_config()[name])

    @pytest.mark.parametrize("cls", ARGUMENTS)
    @pytest.mark.parametrize("name", ["name", "dtype", "trainable"])
    def test_so_do_those_of_keras(self, cls, name):
        if not issubclass(cls, keras.layers.Layer):
            pytest.skip("has them by name, or not at all")
        value = {"name": "another", "dtype": "mixed_bfloat16", "trainable": False}[name]
        base = base_of(cls)
        if name == "dtype" and "encoder" in base:
            base["encoder"] = Encoder(**base_of(Encoder), dtype=value)
        instance = cls(**base, **{name: value})
        copy = keras.saving.deserialize_keras_object(json_copy(instance))
        assert copy.get_config() == instance.get_config()
        for one in (instance, copy):
            found = one.dtype_policy.name if name == "dtype" else getattr(one, name)
            assert found == value
            inner = [layer for layer in one._flatten_layers() if layer is not one]
            if name == "dtype":
                assert {layer.dtype_policy.name for layer in inner} <= {value}
            if name == "trainable":
                assert not one.trainable_weights


class TestArguments:
    """An argument that is accepted and ignored."""

    @pytest.mark.parametrize("cls, name", [(cls, name) for cls in ARGUMENTS for name in ARGUMENTS[cls]])
    def test_every_argument_of_a_constructor_changes_something(self, cls, name):
        if issubclass(cls, keras.Model) and name == "seed":
            base, changed = ({**base_of(cls), "seed": seed} for seed in (3, 4))
        else:
            base, changed = variants(cls, name)
        if (key := (cls, repr(base), observed_by(cls, name))) not in OBSERVED:
            first, again = (observe(cls, base, observed_by(cls, name)) for _ in range(2))
            assert same(first, again), "equal arguments give equal observations"
            OBSERVED[key] = first
        assert not same(OBSERVED[key], observe(cls, changed, observed_by(cls, name)))

    @pytest.mark.parametrize(
        "cls, name", [(cls, name) for cls in ARGUMENTS if issubclass(cls, keras.layers.Layer) for name in calls_of(cls)]
    )
    def test_every_argument_of_a_call_changes_something(self, cls, name):
        layer, inputs = toy(cls, **({"dropout": 0.5} if name == "training" else {}))
        base, changed = CALL_ARGUMENTS[name](layer, dict(inputs))
        results = []
        for arguments in (base, changed):
            keras.utils.set_random_seed(5)
            results.append(flat(layer(arguments.pop("inputs"), **arguments) if "inputs" in arguments
                                else layer(**arguments)))  # fmt: skip
        assert not same(*results)

    @pytest.mark.parametrize("cls", ARGUMENTS)
    def test_unknown_arguments_are_refused(self, cls):
        with pytest.raises((TypeError, ValueError), match="use_gate"):
            cls(**base_of(cls), use_gate=True)
        if not issubclass(cls, keras.layers.Layer):
            return
        layer, inputs = toy(cls)
        symbolic = {name: keras.Input(x.shape[1:], dtype=str(x.dtype)) for name, x in inputs.items()}
        for given in (inputs, symbolic):
            with pytest.raises(TypeError, match="use_gate"):
                layer(given, use_gate=True) if issubclass(cls, keras.Model) else layer(**given, use_gate=True)

    @pytest.mark.parametrize("cls", [TransformerDecoderBlock, TransformerDecoder])
    def test_a_mask_of_a_memory_needs_a_memory(self, cls):
        layer = built(cls(**base_of(cls)), (None, None, D))
        for x, mask in (
            (X, MEMORY_PADDING),
            (keras.KerasTensor((None, None, D)), keras.KerasTensor((None, None), "bool")),
        ):
            with pytest.raises(ValueError, match="built without a memory.*Received: a mask of a memory"):
                layer(x, memory_padding_mask=mask)


class _Holder(keras.Model):
    """A user's model that builds its layer by hand."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.built = True


@pytest.mark.parametrize("cls", [cls for cls in ARGUMENTS if issubclass(cls, keras.layers.Layer)])
def test_a_summary_of_what_was_built_by_hand(cls):
    lines = []
    model, _ = toy(cls)
    if not isinstance(model, keras.Model):
        layer = cls(**base_of(cls))
        shapes = [(None, None, D), (None, None, E)][: 1 + ("memory" in inspect.signature(cls.call).parameters)]
        model = _Holder(built(layer, *shapes) if cls is not TokenEmbedding else built(layer, (None, None)))
    model.summary(expand_nested=True, print_fn=lambda text, **kwargs: lines.append(text))
    assert f"{model.count_params():,}" in "".join(lines)


class TestHeads:
    """A width that the heads do not divide, accepted silently."""

    @pytest.mark.parametrize("heads", [4, 7])
    @pytest.mark.parametrize("cls", with_argument("num_heads"))
    def test_the_error_names_both(self, cls, heads):
        message = f"`num_heads` must divide.*num_heads={heads}, width {D}"
        arguments = {**base_of(cls), "num_heads": heads}
        if issubclass(cls, keras.Model):
            with pytest.raises(ValueError, match=message):
                cls(**arguments)
            return
        memory = "memory" in inspect.signature(cls.call).parameters
        shapes = [(None, None, D), (None, None, E)][: 1 + memory]
        with pytest.raises(ValueError, match=message):
            cls(**arguments).build(*shapes)
        for make in (keras.Input, keras.KerasTensor, ops.zeros):
            tensors = [make((3, 5, shape[-1])[make is keras.Input :]) for shape in shapes]
            with pytest.raises(ValueError, match=message):
                cls(**arguments)(*tensors)
        # A head width of one's own makes any number of heads right.
        assert cls(**arguments, head_dim=5)(*map(keras.KerasTensor, shapes)).shape == shapes[0]
