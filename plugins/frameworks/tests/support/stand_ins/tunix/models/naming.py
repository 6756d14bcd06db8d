"""From the name of a model to its family and to the folder that has it."""


class ModelNaming:
    """Knows the models of one family, and names of one that is converted."""

    def __init__(self, model_id):
        self.model_name = model_id.rpartition("/")[2].lower()
        self.model_family = self.model_name.partition("_")[0]
        if self.model_family not in ("llama3", "gemma"):
            raise ValueError(f"Could not determine model family for: {self.model_name}.")
        self.model_config_category = "llama3"
