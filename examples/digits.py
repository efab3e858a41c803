r"""Trains a Vision Transformer on scikit-learn's handwritten digits, and exports it to ONNX.

1797 images of 8 × 8 grey pixels come with scikit-learn; a fifth, drawn at random but the same in every run, is held
out. Training images are shown moved by one pixel too. For example:

    python examples/digits.py --backend jax --output runs/digits
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from common import begin, finish, options_parser, run_onnx, verbosity


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    begin(options, "digits")
    (images, labels), (test_images, test_labels) = digits()
    images, labels = with_moved(images, labels)
    model = make_model(options, steps=options.epochs * -(-len(images) // options.batch_size))
    print(f"{model.count_params():,} parameters; {len(images)} images to train on, {len(test_images)} held out")
    model.fit(
        images,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test_images, test_labels),
        verbose=verbosity(),
    )
    model.save(options.output / "model.keras")

    from keras_transformer.export import export_onnx

    report = export_onnx(model, options.output / "onnx")
    figures = {
        "Keras": accuracy(model.predict(test_images, verbose=0), test_labels),
        "ONNX Runtime": accuracy(run_onnx(options.output / "onnx/model.onnx", {"images": test_images}), test_labels),
    }
    for engine, share in figures.items():
        print(f"{engine:13} {share:.2%} of the held-out digits are read correctly")
    finish(options, "digits", figures)
    return 0 if report.passed and figures["Keras"] == figures["ONNX Runtime"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to options."""
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--num-layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--d-model", type=int, default=96, help="width (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest (%(default)s)")
    return parser.parse_args(arguments)


def digits():
    """Images (B, 8, 8, 1) from 0 to 1 and labels (B,), of the training set and of the held-out fifth."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))  # the same fifth whatever the seed of the run
    held_out, rest = np.split(order, [len(order) // 5])
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def with_moved(images, labels):
    """The images (B, 8, 8, 1) at all nine places that are a pixel or none away, and the labels of all."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return np.concatenate(moved), np.tile(labels, len(moved))


def make_model(options: argparse.Namespace, steps: int):
    """The compiled model; its learning rate rises for a tenth of `steps` and then falls to 0."""
    import keras

    from keras_transformer.models import VisionTransformer

    model = VisionTransformer(
        num_classes=10,
        image_size=8,
        patch_size=4,
        channels=1,
        num_layers=options.num_layers,
        d_model=options.d_model,
        num_heads=4,
        d_ff=4 * options.d_model,
        dropout=0.0,
        pooling="mean",
        seed=options.seed,
    )
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=steps - steps // 10, warmup_target=options.learning_rate, warmup_steps=steps // 10
    )
    model.compile(keras.optimizers.AdamW(rate, weight_decay=0.05))
    return model


def accuracy(logits, labels) -> float:
    """The share of rows whose highest logit is that of the label."""
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


if __name__ == "__main__":
    sys.exit(main())
