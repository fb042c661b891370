"""What a Hugging Face config.json says, reduced to units, with their parameters, FLOPs and bytes.

`load_model` finds a model, `ModelSpec` is one, `unit_operators` says what a unit computes and
`activation_bytes` what it keeps.
"""

from tutti.models.families import read_config
from tutti.models.flops import flops_per_token, matmul_parameters, unit_operators
from tutti.models.load import catalog_config, catalog_names, load_model
from tutti.models.memory import (
    Recompute,
    activation_bytes,
    boundary_bytes,
    kept_activations,
    local_parameters,
    recompute_flops,
    weight_bytes,
)
from tutti.models.operators import AttentionShape, Kept, Operator, OperatorKind, Work, Workload
from tutti.models.parameters import Parameter, ParameterClass, ParameterKind
from tutti.models.parts import (
    Activation,
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    DropoutSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Placement,
    QkNormSpec,
    Residual,
    RotaryScaling,
    RotarySpec,
    RouterSpec,
)
from tutti.models.plain_decoder import plain_gpt
from tutti.models.spec import ModelSpec

__all__ = [
    "Activation",
    "AlibiSpec",
    "AttentionShape",
    "AttentionSpec",
    "BlockSpec",
    "DropoutSpec",
    "EmbeddingSpec",
    "HeadSpec",
    "Kept",
    "LatentSpec",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NormSpec",
    "Operator",
    "OperatorKind",
    "Parameter",
    "ParameterClass",
    "ParameterKind",
    "Placement",
    "QkNormSpec",
    "Recompute",
    "Residual",
    "RotaryScaling",
    "RotarySpec",
    "RouterSpec",
    "Work",
    "Workload",
    "activation_bytes",
    "boundary_bytes",
    "catalog_config",
    "catalog_names",
    "flops_per_token",
    "kept_activations",
    "load_model",
    "local_parameters",
    "matmul_parameters",
    "plain_gpt",
    "read_config",
    "recompute_flops",
    "unit_operators",
    "weight_bytes",
]
