"""What each key of a GR00T N1.5's config.json does here.

Source: Isaac-GR00T N1.5 ``model/gr00t_n1.py``, ``model/backbone/eagle_backbone.py`` and
``model/action_head/``. Time in training is π₀'s.
"""

from __future__ import annotations

from ..config_keys import TRANSFORMERS, Only, Table, Use, keys

TRANSFORMER: Table = {
    **keys(Use.READ, "num_layers num_attention_heads attention_head_dim"),
    "positional_embeddings": Only(None, missing="sinusoidal"),
    "activation_fn": Only("gelu-approximate"),
    "attention_bias": Only(True),
    **keys(Use.TRAINING, "dropout final_dropout"),
    **keys(Use.SPEED, "upcast_attention max_num_positional_embeddings compute_dtype"),
    **keys(Use.SHAPE, "output_dim cross_attention_dim num_embeds_ada_norm"),
}
DIT: Table = {
    **TRANSFORMER,
    "interleave_self_attention": Use.READ,
    "norm_type": Only("ada_norm"),
    "norm_elementwise_affine": Only(False),
    "norm_eps": Only(1e-5),
}
HEAD: Table = {
    **TRANSFORMERS,
    **keys(
        Use.READ,
        "action_dim action_horizon hidden_size max_num_embodiments max_seq_len max_state_dim num_inference_timesteps",
    ),
    **keys(Use.READ, "num_target_vision_tokens num_timestep_buckets"),
    "diffusion_model_cfg": DIT,
    "vl_self_attention_cfg": TRANSFORMER,
    "add_pos_embed": Only(True),
    "use_vlln": Only(True),
    "expand_batch": Only(None),
    "noise_beta_alpha": Only(1.5),
    "noise_beta_beta": Only(1.0),
    "noise_s": Only(0.999),
    **keys(Use.SHAPE, "max_action_dim input_embedding_dim backbone_embedding_dim"),
    **keys(
        Use.TRAINING,
        "tune_projector tune_diffusion_model freeze_decode_layer load_pretrained_det_decode_layer_path detection_coeff",
    ),
}
KEYS: Table = {
    **TRANSFORMERS,
    "model_type": Use.READ,
    "backbone_cfg": {
        **keys(Use.READ, "eagle_path project_to_dim select_layer"),
        "reproject_vision": Only(False),
        **keys(Use.TRAINING, "tune_llm tune_visual"),
        **keys(Use.SPEED, "load_bf16 use_flash_attention"),
    },
    "action_head_cfg": HEAD,
    **keys(Use.SHAPE, "action_dim action_horizon hidden_size"),
}
