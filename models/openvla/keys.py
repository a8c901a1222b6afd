"""What each key of an OpenVLA's config.json does here.

Source: openvla ``prismatic/extern/hf/configuration_prismatic.py``; the text model is transformers'.
"""

from __future__ import annotations

from ..config_keys import TRANSFORMERS, Only, Table, Use, keys
from .checkpoint import CONVENTIONS
from .vit import TIMM

LLAMAS = (
    "llama2-7b-pure",
    "llama2-7b-chat",
    "llama2-13b-pure",
    "llama2-13b-chat",
    "vicuna-v15-7b",
    "vicuna-v15-13b",
)
TEXT: Table = {
    **TRANSFORMERS,
    "model_type": Only("llama"),
    **keys(
        Use.READ,
        "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range intermediate_size "
        "max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps "
        "rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size",
    ),
    "pretraining_tp": Use.SPEED,
}
KEYS: Table = {
    **TRANSFORMERS,
    "model_type": Only("openvla"),
    "text_config": TEXT,
    **keys(
        Use.READ,
        "image_sizes image_resize_strategy n_action_bins norm_stats pad_to_multiple_of pad_token_id",
    ),
    "use_fused_vision_backbone": Only(True),
    "vision_backbone_id": Only("dinosiglip-vit-so-224px"),
    "timm_model_ids": Only(list(TIMM)),
    "timm_override_act_layers": Only([None, None], None),
    "llm_backbone_id": Only(*LLAMAS),
    **keys(Use.RECORD, "hf_llm_id arch_specifier"),
    **keys(
        Use.SPEED,
        "llm_max_length output_projector_states tie_word_embeddings bos_token_id eos_token_id",
    ),
    # ours
    **keys(
        Use.READ, f"{' '.join(CONVENTIONS)} card chunk embedding_std empty_token_id vision_config"
    ),
}
OFT_KEYS: Table = {**KEYS, "oft": keys(Use.READ, "head chunk proprio film stop_token")}
