"""Flags of what records the training."""

from axlearn.common.launch import FLAGS


def define_flags():
    FLAGS.define("recorder_type")
