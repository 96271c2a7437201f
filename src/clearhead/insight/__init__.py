"""Looks inside any PyTorch model: attention weights, attribution maps, edited heads, and faults."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

if TYPE_CHECKING:
    from clearhead.insight.attribution import deletion_auc as deletion_auc
    from clearhead.insight.attribution import deletion_curve as deletion_curve
    from clearhead.insight.attribution import max_attention as max_attention
    from clearhead.insight.attribution import mean_attention as mean_attention
    from clearhead.insight.attribution import occlusion as occlusion
    from clearhead.insight.attribution import output_map as output_map
    from clearhead.insight.attribution import relevance as relevance
    from clearhead.insight.attribution import relevance_encoder_decoder as relevance_encoder_decoder
    from clearhead.insight.attribution import rollout as rollout
    from clearhead.insight.attribution import rollout_encoder_decoder as rollout_encoder_decoder
    from clearhead.insight.doctor.examine import examine as examine
    from clearhead.insight.doctor.report import Finding as Finding
    from clearhead.insight.doctor.report import Report as Report
    from clearhead.insight.head_plots import draw_attributions as draw_attributions
    from clearhead.insight.head_plots import draw_head_entropy as draw_head_entropy
    from clearhead.insight.head_plots import draw_head_importance as draw_head_importance
    from clearhead.insight.head_plots import draw_training_strip as draw_training_strip
    from clearhead.insight.head_plots import save_animation as save_animation
    from clearhead.insight.heads import class_token_mass as class_token_mass
    from clearhead.insight.heads import diagonality as diagonality
    from clearhead.insight.heads import distance as distance
    from clearhead.insight.heads import edit as edit
    from clearhead.insight.heads import entropy as entropy
    from clearhead.insight.heads import head_importance as head_importance
    from clearhead.insight.leaks import Leak as Leak
    from clearhead.insight.leaks import future_leak as future_leak
    from clearhead.insight.leaks import padding_leak as padding_leak
    from clearhead.insight.plots import draw_alignment as draw_alignment
    from clearhead.insight.plots import draw_head as draw_head
    from clearhead.insight.plots import draw_head_grid as draw_head_grid
    from clearhead.insight.plots import draw_matrix as draw_matrix
    from clearhead.insight.plots import draw_over_image as draw_over_image
    from clearhead.insight.plots import draw_tokens as draw_tokens
    from clearhead.insight.trace import AttentionRecord as AttentionRecord
    from clearhead.insight.trace import AttentionTrace as AttentionTrace
    from clearhead.insight.trace import look as look

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.insight.trace": ("look", "AttentionTrace", "AttentionRecord"),
        "clearhead.insight.heads": (
            "edit",
            "head_importance",
            "entropy",
            "distance",
            "diagonality",
            "class_token_mass",
        ),
        "clearhead.insight.attribution": (
            "mean_attention",
            "max_attention",
            "rollout",
            "rollout_encoder_decoder",
            "relevance",
            "relevance_encoder_decoder",
            "output_map",
            "occlusion",
            "deletion_curve",
            "deletion_auc",
        ),
        "clearhead.insight.plots": (
            "draw_head",
            "draw_head_grid",
            "draw_matrix",
            "draw_alignment",
            "draw_over_image",
            "draw_tokens",
        ),
        "clearhead.insight.head_plots": (
            "draw_head_importance",
            "draw_attributions",
            "draw_head_entropy",
            "draw_training_strip",
            "save_animation",
        ),
        "clearhead.insight.leaks": ("Leak", "future_leak", "padding_leak"),
        "clearhead.insight.doctor.examine": ("examine",),
        "clearhead.insight.doctor.report": ("Report", "Finding"),
    },
)
