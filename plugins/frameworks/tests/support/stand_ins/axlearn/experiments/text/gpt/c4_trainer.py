"""Named configurations."""

from axlearn.common.attention import RematRegexSavePatterns
from axlearn.common.base_layer import RematSpec
from axlearn.common.config import ConfigBase, config_for_function
from axlearn.common.gradient_accumulation import with_minibatch_steps
from axlearn.common.trainer import SpmdTrainer
from axlearn.common.utils import HybridMeshShape, save_and_offload_only_these_names_regex

AXES = ("pipeline", "data", "expert", "fsdp", "seq", "model")


def _layer():
    policy = config_for_function(save_and_offload_only_these_names_regex).set(
        names_which_can_be_saved=RematRegexSavePatterns.NATIVE_ATTENTION.value,
        names_which_can_be_offloaded=None,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return ConfigBase(
        remat_spec=RematSpec(prevent_cse=False, policy=policy),
        self_attention=ConfigBase(num_heads=4, input_linear=ConfigBase(num_kv_heads=2)),
        feed_forward=ConfigBase(hidden_dim=32),
    )


def _trainer():
    cfg = SpmdTrainer.default_config().set(
        mesh_axis_names=AXES,
        mesh_shape=(1, -1, 1, 1, 1, 1),
        mesh_rules=(
            ("tpu-v5p-.*", (1, 2, 1, 2, 1, -1)),
            ("gpu-.*", HybridMeshShape((1, 1, 1, -1, 1, 1), (1, -1, 1, 1, 1, 1))),
        ),
    )
    cfg.model.decoder.transformer = ConfigBase(num_layers=4, layer=_layer())
    return cfg


def _accumulating():
    cfg = _trainer()
    cfg.learner.forward_fn_transformation = config_for_function(with_minibatch_steps).set(
        steps=4, grad_dtype="float32"
    )
    return cfg


def _transforming():
    cfg = _trainer()
    cfg.learner.forward_fn_transformation = config_for_function(lambda: 1)
    return cfg


def _stacked():
    cfg = _trainer()
    del cfg.model.decoder.transformer.layer
    return cfg


def named_trainer_configs():
    return {
        "fuji-test-v1": _trainer,
        "fuji-test-accumulating": _accumulating,
        "fuji-test-transforming": _transforming,
        "fuji-test-stacked": _stacked,
    }
