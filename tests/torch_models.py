"""Whole models through torch.compile(backend="onnxc"), against eager PyTorch: what is right, what falls back.

    python tests/torch_models.py                  # architectures of transformers: small configs, random weights
    python tests/torch_models.py --zoo            # the zoo's modules
    python tests/torch_models.py mixtral bart     # these

Prints a line for each: the greatest difference to eager PyTorch, graphs, programs, and every fallback by name.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import onnxc
from onnxc.torch.backend import _programs, backend

Built = tuple[torch.nn.Module, dict[str, Any]]  # module, keyword arguments


@dataclass
class Result:
    """What became of a model.

    Attributes:
        error: the greatest difference to eager PyTorch, over the greatest number in the result.
        graphs, programs: how many Dynamo made, and how many programs they became.
        fallbacks: what PyTorch computes, and where Dynamo broke the graph.
    """

    error: float
    graphs: int
    programs: int
    seconds: float
    fallbacks: list[str] = field(default_factory=list)


def ids(*shape: int) -> torch.Tensor:
    """Token numbers."""
    return torch.randint(3, 90, shape)


def text(model: str, config: str, **more: Any) -> Callable[[], Built]:
    """A model of tokens with a mask, two layers wide 64."""

    def build() -> Built:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, 6:] = 0
        return made(model, config, **SMALL, **more), {"input_ids": ids(2, 9), "attention_mask": mask}

    return build


def decoder(model: str, config: str, **more: Any) -> Callable[[], Built]:
    """A decoder that goes on from a cache of five tokens."""

    def build() -> Built:
        from transformers import DynamicCache

        module = made(model, config, **SMALL, **more)
        cache = module(input_ids=ids(2, 5), past_key_values=DynamicCache(config=module.config), use_cache=True)
        flat = [(layer.keys, layer.values) for layer in cache.past_key_values.layers]
        return FromCache(module), {"input_ids": ids(2, 3), "cache": flat}

    return build


class FromCache(torch.nn.Module):  # type: ignore[misc]
    """A decoder as a function of tokens and of the tensors of its cache; it returns the new ones too."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Logits, and the cache."""
        from transformers import DynamicCache

        kept = DynamicCache(config=self.module.config)
        for k, (keys, values) in enumerate(cache):
            kept.update(keys, values, k)
        found = self.module(input_ids=input_ids, past_key_values=kept, use_cache=True)
        return found.logits, [(layer.keys, layer.values) for layer in kept.layers]


def image(model: str, config: str, size: int = 32, **more: Any) -> Callable[[], Built]:
    """A model of images."""
    return lambda: (made(model, config, **more), {"pixel_values": torch.randn(2, 3, size, size)})


def pair(model: str, config: str, **more: Any) -> Callable[[], Built]:
    """An encoder and a decoder of tokens."""
    return lambda: (
        made(model, config, **more),
        {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 5), "use_cache": False},
    )


def sound(model: str, config: str, **more: Any) -> Callable[[], Built]:
    """A model of samples of sound."""
    return lambda: (made(model, config, **more), {"input_values": torch.randn(2, 1600)})


def made(model: str, config: str, **options: Any) -> torch.nn.Module:
    """A model of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, config)
    known = {k: v for k, v in options.items() if k not in SMALL or _has(kind, k)}
    return getattr(transformers, model)(kind(**known)).eval()


def _has(config: Any, name: str) -> bool:
    names = {*dir(config()), *getattr(config, "attribute_map", {})}
    return name in names


SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
_SEQ2SEQ = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 1,
    "decoder_start_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_WAVE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip

MODELS: dict[str, Callable[[], Built]] = {
    # encoders
    "albert": text("AlbertModel", "AlbertConfig", embedding_size=32),
    "roberta": text("RobertaModel", "RobertaConfig"),
    "distilbert": text("DistilBertModel", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=96),
    "electra": text("ElectraModel", "ElectraConfig", embedding_size=32),
    "deberta_v2": text("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "modernbert": text("ModernBertModel", "ModernBertConfig", local_attention=4, pad_token_id=0),
    "roformer": text("RoFormerModel", "RoFormerConfig"),
    "xlnet": lambda: (
        made("XLNetModel", "XLNetConfig", vocab_size=99, d_model=64, n_layer=2, n_head=4, d_inner=96),
        {"input_ids": ids(2, 9), "attention_mask": torch.ones(2, 9)},
    ),
    "bigbird": lambda: (
        made("BigBirdModel", "BigBirdConfig", **SMALL, block_size=4, num_random_blocks=1),
        {"input_ids": ids(2, 48), "attention_mask": (torch.arange(48) < torch.tensor([[48], [40]])).long()},
    ),
    # decoders, with caches
    "gpt_neox": decoder("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "opt": decoder("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=64),
    "bloom": decoder("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "qwen3": decoder("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=16),
    "gemma2": decoder("Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, head_dim=16, sliding_window=4),
    "phi3": decoder("Phi3ForCausalLM", "Phi3Config", num_key_value_heads=2, pad_token_id=0),
    "falcon": decoder("FalconForCausalLM", "FalconConfig"),
    "gemma3": decoder("Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=16, sliding_window=4),
    "olmo2": decoder("Olmo2ForCausalLM", "Olmo2Config", num_key_value_heads=2),
    "cohere": decoder("CohereForCausalLM", "CohereConfig", num_key_value_heads=2),
    "granite": decoder("GraniteForCausalLM", "GraniteConfig", num_key_value_heads=2, residual_multiplier=0.3),
    # mixtures of experts, state spaces
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4),
    "qwen3_moe": text(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "mamba": text("MambaForCausalLM", "MambaConfig", state_size=8, use_cache=False),
    "gpt_oss": text(
        "GptOssForCausalLM", "GptOssConfig", num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=4, rope_parameters=None,
    ),
    "deepseek_v3": text(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1,
    ),
    "mamba2": text(
        "Mamba2ForCausalLM", "Mamba2Config", state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=4,
        use_cache=False,
    ),
    "bamba": text(
        "BambaForCausalLM", "BambaConfig", num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=4, use_cache=False,
    ),
    "rwkv": lambda: (
        made("RwkvForCausalLM", "RwkvConfig", hidden_size=32, attention_hidden_size=32, num_hidden_layers=2,
             vocab_size=99, context_length=32),
        {"input_ids": ids(2, 7)},
    ),
    # vision
    "swin": image("SwinModel", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
                  num_heads=[2, 4], window_size=4),
    "dinov2": image("Dinov2Model", "Dinov2Config", **_VIT),
    "beit": image("BeitModel", "BeitConfig", **_VIT),
    "segformer": image("SegformerForSemanticSegmentation", "SegformerConfig", size=64, hidden_sizes=[16, 32, 48, 64],
                       depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32),
    "convnextv2": image("ConvNextV2Model", "ConvNextV2Config", size=64, hidden_sizes=[16, 24, 32, 48],
                        depths=[1, 1, 2, 1]),
    "clip": lambda: (
        made("CLIPModel", "CLIPConfig",
             text_config=SMALL | {"projection_dim": 32, "eos_token_id": 2},
             vision_config=_VIT | {"projection_dim": 32}, projection_dim=32),
        {"input_ids": ids(2, 9), "pixel_values": torch.randn(2, 3, 32, 32)},
    ),
    "siglip": lambda: (
        made("SiglipModel", "SiglipConfig", text_config=SMALL | {"projection_size": 64}, vision_config=_VIT),
        {"input_ids": ids(2, 9), "pixel_values": torch.randn(2, 3, 32, 32)},
    ),
    "swinv2": image("Swinv2Model", "Swinv2Config", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
                    num_heads=[2, 4], window_size=4),
    "regnet": image("RegNetModel", "RegNetConfig", embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1],
                    groups_width=4),
    "yolos": image("YolosForObjectDetection", "YolosConfig", **(_VIT | {"image_size": [32, 32]}),
                   num_detection_tokens=5),
    "sam": lambda: (
        made("SamModel", "SamConfig",
             vision_config={"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                            "image_size": 64, "patch_size": 8, "mlp_dim": 48, "window_size": 4,
                            "global_attn_indexes": [1], "num_pos_feats": 8},
             prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
             mask_decoder_config={"hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                                  "iou_head_hidden_dim": 16}),
        {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 60},
    ),
    # audio
    "wav2vec2": sound("Wav2Vec2Model", "Wav2Vec2Config", **_WAVE),
    "hubert": sound("HubertModel", "HubertConfig", **_WAVE),
    "wavlm": sound("WavLMModel", "WavLMConfig", **_WAVE),
    "sew": sound("SEWModel", "SEWConfig", **_WAVE, squeeze_factor=2),
    "whisper": lambda: (
        made("WhisperModel", "WhisperConfig", **_SEQ2SEQ, num_mel_bins=16, max_source_positions=24,
             max_target_positions=16),
        {"input_features": torch.randn(2, 16, 48), "decoder_input_ids": ids(2, 5), "use_cache": False},
    ),
    # encoders and decoders
    "bart": pair("BartModel", "BartConfig", **_SEQ2SEQ),
    "marian": pair("MarianModel", "MarianConfig", **_SEQ2SEQ),
    "pegasus": pair("PegasusModel", "PegasusConfig", **_SEQ2SEQ),
    "mt5": pair("MT5Model", "MT5Config", d_model=64, d_ff=96, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=4,
                vocab_size=99),
    # series of numbers
    "patchtst": lambda: (
        made("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=3, context_length=32, patch_length=4,
             patch_stride=4, d_model=32, num_attention_heads=4, ffn_dim=48, num_hidden_layers=2, prediction_length=8),
        {"past_values": torch.randn(2, 32, 3)},
    ),
    "timesfm": lambda: (
        made("TimesFmModel", "TimesFmConfig", patch_length=8, context_length=32, horizon_length=8, hidden_size=32,
             intermediate_size=48, head_dim=16, num_hidden_layers=2, num_attention_heads=2),
        {"past_values": torch.randn(2, 32), "past_values_padding": torch.zeros(2, 32),
         "freq": torch.zeros(2, 1, dtype=torch.long)},
    ),
}  # fmt: skip


def zoo() -> Mapping[str, Callable[[], Built]]:
    """The zoo's modules."""
    from models.zoo.catalogue import CATALOGUE
    from models.zoo.export import make

    return {name: partial(_by_position, make, name) for name in CATALOGUE}


def _by_position(make: Callable[[str], Any], name: str) -> Built:
    module, args, _ = make(name)
    return Call(module), {"args": args}


class Call(torch.nn.Module):  # type: ignore[misc]
    """A module, called with a list of arguments."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[torch.Tensor, ...]) -> Any:
        """What the module returns."""
        return self.module(*args)


def checked(module: torch.nn.Module, kwargs: Mapping[str, Any], args: tuple[Any, ...] = (), **options: Any) -> Result:
    """Runs a module compiled and not."""
    torch._dynamo.reset()
    counters.clear()
    start = time.time()
    _programs.clear()  # graphs of other models, which live until they are collected
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        expected = module(*args, **kwargs)
        found = torch.compile(module, backend=backend, **options)(*args, **kwargs)
    graphs = onnxc.torch.report().graphs
    fallbacks = sorted({str(f) for g in graphs for f in g.fallbacks})
    fallbacks += [f"graph break: {' '.join(why.split())[:200]}" for why in counters["graph_break"]]
    programs = sum(len(g.programs) for g in graphs)
    return Result(difference(found, expected), len(graphs), programs, time.time() - start, fallbacks)


def difference(found: Any, expected: Any) -> float:
    """The greatest difference, over the greatest number of the tensor that it is in."""
    a, b = (tensors(x) for x in (found, expected))
    assert len(a) == len(b), f"{len(a)} tensors, not {len(b)}"
    assert any(y.is_floating_point() and bool((y != y.flatten()[:1]).any()) for y in b), "the results say nothing"
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.dtype}{x.shape} is not {y.dtype}{y.shape}"
        if y.numel():
            x, y = x.double(), y.double()
            assert torch.equal(torch.isfinite(x), torch.isfinite(y)), "infinite at other places"
            y = torch.nan_to_num(y, 0, 0, 0)
            worst = max(worst, float((torch.nan_to_num(x, 0, 0, 0) - y).abs().max() / y.abs().max().clamp(min=1e-6)))
    return worst


def tensors(x: Any) -> list[torch.Tensor]:
    """The tensors in what a model returns."""
    return [leaf for leaf in pytree.tree_leaves(_plain(x)) if isinstance(leaf, torch.Tensor)]


def _plain(x: Any) -> Any:
    if hasattr(x, "to_tuple"):
        return [_plain(v) for v in x.to_tuple()]
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names; default: all")
    parser.add_argument("--zoo", action="store_true", help="the zoo's modules")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    table = dict(zoo()) if given.zoo else MODELS
    for name in given.models or table:
        try:
            torch.manual_seed(1)
            result = checked(*table[name]())
            print(
                f"{name:16} {'right' if result.error < 1e-3 else 'WRONG'}  {result.error:.1e}  {result.graphs} graphs, "
                f"{result.programs} programs, {result.seconds:.0f} s, {len(result.fallbacks)} fallbacks"
            )
            for line in result.fallbacks:
                print(f"    {line}")
        except Exception as error:
            print(f"{name:16} FAILS {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
