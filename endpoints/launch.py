"""temporary shim by the lead; helper-3 overwrites"""
from endpoints.child import EndpointError as EndpointError


def check_endpoint(base_url: str, model: str) -> bool:
    return False


def start_endpoint(base_url, model, log_path, tell):  # type: ignore
    return None
