"""The studio: schedules in a browser, computed by this library.

    requests.py  JSON request -> JSON answer; the only functions that the page calls
    settings.py  what the page asks for, checked
    page/        the page: plain HTML, CSS and JavaScript
        app.js       the setting, what is asked, and what is shown of the answers
        engine.js    asks the worker, one request at a time, the most urgent first
        worker.js    runs requests.py in Pyodide
        data.js      answers as typed arrays; numbers as text
        lanes.js     the timeline on a canvas
        charts.js    memory, bars of costs, the plot and table of all schedules
        learn.js     the chapters of the lesson
        share.js     a setting in the address; downloads
        presets.js   settings to begin with
    build.py     copies the page, Pyodide and the modules that it needs to one static folder
    server.py    serves that folder on this machine

The page runs `requests.py` in a web worker, in Pyodide, which is CPython compiled to WebAssembly.
So the page shows what the library computes. Nothing here imports torch.
"""
