"""Other engines as somebody who follows their documentation would use them, for ``side_by_side.py --engines``.

DS_BUILD_OPS=0 .venv/bin/pip install --no-build-isolation accelerate deepspeed
"""
