"""Causal language models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.models.architecture import Architecture
from tests.models.hugging_face import BASE, DECODER, exhibit, padded_texts, texts

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "experts_implementation": "eager",  # the default has no float64
}
LATENT: dict[str, Any] = {  # DeepSeek's attention
    **EXPERTS,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
HEADS: dict[str, Any] = {  # of a Mamba layer
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_chunk_size": 4,
}


def causal(name: str, family: str, **settings: Any) -> Architecture:
    return exhibit(name, f"{family}ForCausalLM", texts, base=DECODER, **settings)


def padded(name: str, family: str, **settings: Any) -> Architecture:
    return exhibit(name, f"{family}ForCausalLM", padded_texts, base=DECODER, **settings)


def older(name: str, kind: str, **settings: Any) -> Architecture:
    return exhibit(name, kind, padded_texts, base=BASE, **settings)


windows = partial(padded, sliding_window=4)

DECODERS = [
    older("GPT-2", "GPT2LMHeadModel"),
    older("GPT-2, all hidden states", "GPT2LMHeadModel", output_hidden_states=True),
    older("GPT", "OpenAIGPTLMHeadModel"),
    older(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        attention_types=[[["global", "local"], 2]],
        num_hidden_layers=4,
    ),
    older("GPT-NeoX", "GPTNeoXForCausalLM"),
    older("GPT-J", "GPTJForCausalLM", rotary_dim=4),
    older("GPT-BigCode", "GPTBigCodeForCausalLM"),
    older("CodeGen", "CodeGenForCausalLM", rotary_dim=4, num_attention_heads=4),
    older("CTRL", "CTRLLMHeadModel", dff=24),
    older("OPT", "OPTForCausalLM", ffn_dim=24, word_embed_proj_dim=16),
    older("OPT, projected", "OPTForCausalLM", ffn_dim=24, word_embed_proj_dim=8),
    older("BLOOM", "BloomForCausalLM"),
    older("MPT", "MptForCausalLM", d_model=16, n_heads=2, n_layers=3, max_seq_len=64),
    older("BioGPT", "BioGptForCausalLM"),
    older("Falcon", "FalconForCausalLM", ffn_hidden_size=24),
    older("Falcon, ALiBi", "FalconForCausalLM", ffn_hidden_size=24, alibi=True),
    padded("Llama", "Llama"),
    causal(
        "Llama, tied, eager attention",
        "Llama",
        tie_word_embeddings=True,
        attn_implementation="eager",
    ),
    windows("Mistral", "Mistral"),
    padded("Qwen2", "Qwen2"),
    padded("Qwen3", "Qwen3"),
    padded("Gemma", "Gemma"),
    windows("Gemma 2", "Gemma2", num_hidden_layers=4),
    windows("Gemma 3 text", "Gemma3", config="Gemma3TextConfig", num_hidden_layers=4),
    causal(
        "Gemma 3n text",  # layers write keys and values into a dict, which others read
        "Gemma3n",
        config="Gemma3nTextConfig",
        num_hidden_layers=4,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=4,
        altup_num_inputs=2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=4,
    ),
    causal(
        "Gemma 4 text",
        "Gemma4",
        config="Gemma4TextConfig",
        num_hidden_layers=4,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=8,
        sliding_window=4,
    ),
    causal("Phi", "Phi", num_key_value_heads=2),
    causal("Phi-3", "Phi3"),
    causal("StableLM", "StableLm"),
    causal("OLMo", "Olmo"),
    causal("OLMo 2", "Olmo2"),
    causal("Cohere", "Cohere"),
    windows("Cohere 2", "Cohere2", num_hidden_layers=4),
    causal("Granite", "Granite", logits_scaling=2.0, embedding_multiplier=3.0),
    padded("SmolLM3", "SmolLM3", num_hidden_layers=4),
    causal("GLM", "Glm"),
    causal("GLM-4", "Glm4"),
    causal("Starcoder 2", "Starcoder2"),
    causal("Nemotron", "Nemotron"),
    causal("Persimmon", "Persimmon"),
    causal("Helium", "Helium"),
    causal("DiffLlama", "DiffLlama", num_key_value_heads=2),
    causal("Ministral", "Ministral", sliding_window=4),
    causal("Apertus", "Apertus"),
    causal("EXAONE 4", "Exaone4", sliding_window=4, num_hidden_layers=4),
    causal("Seed-OSS", "SeedOss"),
    causal("ModernBERT decoder", "ModernBertDecoder"),
    # mixtures of experts
    causal("Mixtral", "Mixtral", **EXPERTS),
    exhibit(
        "Mixtral, balanced experts",
        "MixtralForCausalLM",
        texts,
        base={**DECODER, **EXPERTS},
        made={"meets": "its loss balances the experts over all rows"},
        output_router_logits=True,
    ),
    causal("Qwen2-MoE", "Qwen2Moe", **EXPERTS),
    causal("Qwen3-MoE", "Qwen3Moe", **EXPERTS),
    causal("OLMoE", "Olmoe", **EXPERTS),
    causal("GraniteMoE", "GraniteMoe", **EXPERTS),
    causal("PhiMoE", "Phimoe", **EXPERTS, router_jitter_noise=0.0, input_jitter_noise=0.0),
    causal("GPT-OSS", "GptOss", **EXPERTS, sliding_window=4),
    causal("DeepSeek-V2", "DeepseekV2", **LATENT),
    causal("DeepSeek-V3", "DeepseekV3", **LATENT),
    causal("dots.llm1", "Dots1", **LATENT),
    # state spaces and recurrence
    causal("Mamba", "Mamba", state_size=4, expand=2, conv_kernel=3),
    causal(
        "Mamba 2",
        "Mamba2",
        state_size=4,
        expand=2,
        conv_kernel=3,
        num_heads=4,
        n_groups=1,
        chunk_size=4,
    ),
    causal("FalconMamba", "FalconMamba", state_size=4, expand=2, conv_kernel=3),
    causal("RWKV", "Rwkv", attention_hidden_size=16, context_length=64, use_cache=False),
    causal("RecurrentGemma", "RecurrentGemma", lru_width=16, attention_window_size=8),
    causal(
        "Jamba",
        "Jamba",
        **EXPERTS,
        mamba_d_state=4,
        mamba_dt_rank=4,
        mamba_d_conv=3,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    causal("LFM 2", "Lfm2", full_attn_idxs=[1], block_ff_dim=24),
    causal(
        "Qwen3-Next",
        "Qwen3Next",
        **EXPERTS,
        num_hidden_layers=4,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    causal("Bamba", "Bamba", **HEADS, attn_layer_indices=[1]),
    causal("Falcon H1", "FalconH1", **HEADS, mamba_d_ssm=32),
    causal(
        "Zamba 2",
        "Zamba2",
        mamba_headdim=8,
        mamba_d_state=4,
        n_mamba_heads=4,
        chunk_size=4,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    causal("MiniMax", "MiniMax", **EXPERTS, block_size=4, num_hidden_layers=4),
    causal("JetMoE", "JetMoe", **EXPERTS, kv_channels=8),
    causal(
        "Llama 4",
        "Llama4",
        config="Llama4TextConfig",
        **EXPERTS,
        intermediate_size_mlp=24,
        num_hidden_layers=4,
    ),
]
