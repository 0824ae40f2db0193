"""Tiny models built from MindFormers' own mcore classes: Qwen3, and DeepSeek-V3 with experts."""

import mindspore
from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
from mindformers.wrapper.wrapper import DataOrderWrapperCell

# The shape of a batch of tokens, and the number of different tokens.
BATCH, SEQ_LENGTH, VOCABULARY = 2, 16, 64
INPUTS = ["input_ids", "labels", "loss_mask"]
# Compute in FP16, but keep weights, normalisation, softmax and rotary embedding in FP32.
FP32 = ("params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
DTYPES = {"compute_dtype": "fp16", **dict.fromkeys(FP32, "fp32")}


def build_qwen3(**options):
    """Return a Qwen3 of two layers that computes in FP16 and takes ``input_ids``, ``labels`` and ``loss_mask``."""
    mindspore.set_seed(0)
    sizes = {"vocab_size": VOCABULARY, "seq_length": SEQ_LENGTH, "max_position_embeddings": 2 * SEQ_LENGTH}
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_dropout": 0.0}
    return DataOrderWrapperCell(INPUTS, TrainingQwen3ForCausalLM(Qwen3Config(**sizes | DTYPES | options)))


def build_deepseek():
    """Return a DeepSeek-V3 of two layers, with the same inputs.

    It has latent attention, experts, multi-token prediction and a load-balancing loss.
    """
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.deepseek3.modeling_deepseek_v3_train import TrainingDeepseekV3ForCausalLM

    mindspore.set_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "seq_length": SEQ_LENGTH,
        "max_position_embeddings": 2 * SEQ_LENGTH,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    latent = {"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 16, "q_lora_rank": 16}
    heads = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "use_flash_attention": True}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "router_dense_type": "float32",
        "use_pad_tokens": False,
    }
    layers = {"add_bias_linear": False, "gated_linear_unit": True, "hidden_dropout": 0.0}
    second_token = {"num_nextn_predict_layers": 1, "mtp_loss_factor": 0.3}
    config = DeepseekV3Config(**sizes, **latent, **heads, **experts, **layers, **second_token, **DTYPES)
    return DataOrderWrapperCell(INPUTS, TrainingDeepseekV3ForCausalLM(config))
