"""llama.cpp's server from the Python package xllamacpp, with those options of `llama-server` that are used here.

It runs in an interpreter that has this package, and needs nothing else of it.
"""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("-m", "--host", "-ctk", "-ctv", "--fit"):
        parser.add_argument(option)
    for option in ("--port", "-c", "-np", "-t", "--cache-ram"):
        parser.add_argument(option, type=int)
    for option in ("-kvu", "--no-cache-prompt", "--no-ui", "--metrics"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args()
    import xllamacpp

    kinds = {
        name: getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}") for name in (asked.ctk, asked.ctv)
    }
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = asked.m, asked.port, [asked.host]
    params.n_ctx, params.n_parallel, params.kv_unified = asked.c, asked.np, asked.kvu
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.t
    params.cache_type_k, params.cache_type_v = kinds[asked.ctk], kinds[asked.ctv]
    params.cache_prompt, params.cache_ram_mib, params.fit_params = False, asked.cache_ram, False
    params.n_gpu_layers, params.endpoint_metrics = 0, asked.metrics
    server = xllamacpp.Server(params)
    while server.listening_address:  # a signal ends it
        signal.pause()


if __name__ == "__main__":
    main()
