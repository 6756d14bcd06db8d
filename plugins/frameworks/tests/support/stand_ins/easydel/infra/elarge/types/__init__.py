"""The keys of a file of settings."""

from typing import Any, TypedDict


class ModelCfg(TypedDict, total=False):
    name_or_path: str
    tokenizer: str
    task: str


class LoaderCfg(TypedDict, total=False):
    dtype: str
    param_dtype: str
    precision: str
    verbose: bool


class ShardingCfg(TypedDict, total=False):
    axis_dims: Any
    axis_names: Any
    dcn_axis_dims: Any
    partition_axis: Any
    auto_shard_model: bool


class PlatformCfg(TypedDict, total=False):
    backend: str
    platform: str


class BaseCfg(TypedDict, total=False):
    values: dict
    operation_configs: dict


class eLMConfig(TypedDict, total=False):
    model: ModelCfg
    loader: LoaderCfg
    sharding: ShardingCfg
    platform: PlatformCfg
    quantization: dict
    base_config: BaseCfg
    mixture: dict
    trainer: dict
