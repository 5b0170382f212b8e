"""Makes parity.npz: logits of `transformers` on the random checkpoints of checkpoints.py, and its rope tables.

Run by hand in an environment with torch, transformers and safetensors: python tests/golden/make_parity.py
"""

import json
import pathlib
import tempfile

import checkpoints
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent


def logits(config: dict) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        save_file(checkpoints.tensors(config), path / "model.safetensors", metadata={"format": "pt"})
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            out = model.eval()(torch.tensor(checkpoints.tokens()[None], dtype=torch.long)).logits[0]
    print(config["model_type"], float(out.std()), model.model.rotary_emb.inv_freq[:3].tolist())
    return out.numpy()[:: checkpoints.SHOWN].astype(np.float32)


def table(config: dict) -> np.ndarray:
    """Inverse frequencies, then the factor on cos and sin."""
    loaded = transformers.AutoConfig.for_model(**config)
    inverse, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[loaded.rope_parameters["rope_type"]](loaded, "cpu")
    return np.append(inverse.numpy(), np.float32(factor))


if __name__ == "__main__":
    found = {name: logits(config) for name, config in checkpoints.CASES.items()}
    found |= {f"rope_{name}": table(config) for name, config in checkpoints.ROPES.items()}
    np.savez_compressed(HERE / "parity.npz", **found)
