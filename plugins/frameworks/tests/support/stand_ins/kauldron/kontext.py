"""Keys of configurations."""


def set_by_path(config, path, value):
    *parents, last = path.split(".")
    for name in parents:
        if not isinstance(config, dict) and not hasattr(config, name):
            raise KeyError(f"Error trying to mutate path {path}: Error accessing '{name}'")
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    if isinstance(config, dict):
        config[last] = value
    else:
        setattr(config, last, value)
