"""Settings of the doors for Amazon SageMaker and Google Vertex AI. Free of any server: the command line reads it."""

from dataclasses import dataclass

from .server_options import BooleanFlag, PortFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOptions:
    """Doors for clouds, under tritonserver's names."""

    allow_sagemaker: BooleanFlag = "false"
    """Serve what SageMaker asks of a container; its variables say which model."""
    sagemaker_port: PortFlag = 8080
    """Port of SageMaker's door."""
    allow_vertex_ai: BooleanFlag = "false"
    """Serve what Vertex AI asks of a container; its variables say on which paths."""
    vertex_ai_port: PortFlag | None = None
    """Port of Vertex AI's door; without it AIP_HTTP_PORT says, or 8080."""
    vertex_ai_default_model: str = ""
    """Model that Vertex AI asks; may be left out where there is one."""
