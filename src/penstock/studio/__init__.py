"""The studio: schedules in a browser, computed by this library.

    requests.py  JSON request -> JSON answer; the only functions that the page calls
    settings.py  what the page asks for, checked
    page/        the page: plain HTML, CSS and JavaScript
    build.py     copies the page, Pyodide and the modules that it needs to one static folder
    server.py    serves that folder on this machine

The page runs `requests.py` in a web worker, in Pyodide, which is CPython compiled to WebAssembly.
So the page shows what the library computes. Nothing here imports torch.
"""
