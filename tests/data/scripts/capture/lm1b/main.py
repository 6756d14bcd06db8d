"""Trains a language model, in the style of flax's `examples/lm1b`."""

import train
from absl import app, flags

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_train_steps", 4, "Steps to train for.")
flags.DEFINE_integer("ici_fsdp_parallelism", -1, "Devices that share the parameters.")
flags.DEFINE_integer("ici_tensor_parallelism", 1, "Devices that share a layer.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError("Too many command-line arguments.")
    config = train.Config(
        num_train_steps=FLAGS.num_train_steps,
        ici_fsdp_parallelism=FLAGS.ici_fsdp_parallelism,
        ici_tensor_parallelism=FLAGS.ici_tensor_parallelism,
    )
    train.train_and_evaluate(config)


if __name__ == "__main__":
    app.run(main)
