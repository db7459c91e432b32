"""The two programs that run on the device before edgeds is there. Plain Python 3.6 and up, standard library only.

They travel over the standard input of ``python3 -``, so nothing is installed to find out what is there. The answer is
one line behind a marker, since a login shell may print a greeting.
"""

from __future__ import annotations

MARKER = "EDGEDS-ANSWER "

# argv: remote folder ("" for the default), bundle name, "make" or "look".
PROBE = r"""
import hashlib, json, os, platform, shutil, subprocess, sys
home = os.environ.get("HOME") or os.path.expanduser("~")
asked, name, mode = sys.argv[1:4]
folder = os.path.join(home, os.path.expanduser(asked) if asked else os.path.join("edgeds", name))
folder = os.path.normpath(folder)
registry = os.path.join(home, ".edgeds", "pushed")
mark = os.path.join(registry, hashlib.sha256(folder.encode("utf-8", "surrogateescape")).hexdigest())

def read(path):
    try:
        with open(path, "rb") as stream:
            return stream.read(4096).replace(b"\0", b"\n").decode("utf-8", "replace")
    except OSError:
        return None

def ask(python, code):
    try:
        done = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=60, cwd="/")
        return done.stdout.decode("utf-8", "replace").strip().splitlines()[-1] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None

def digest(root):
    total = hashlib.sha256()
    found = []
    for here, _, files in os.walk(root):
        if "__pycache__" not in here:
            found += [os.path.join(here, f) for f in files if os.path.splitext(f)[1] in (".py", ".typed", ".json")]
    for path in sorted(found, key=lambda p: os.path.relpath(p, root).split(os.sep)):
        with open(path, "rb") as stream:
            body = hashlib.sha256(stream.read()).digest()
        total.update(b"edgeds/" + os.path.relpath(path, root).replace(os.sep, "/").encode() + b"\0" + body)
    return total.hexdigest()

problem = None
files = {}
if os.path.isdir(folder):
    for here, _, names in os.walk(folder):
        for item in names:
            path = os.path.join(here, item)
            try:
                files[os.path.relpath(path, folder)] = os.lstat(path).st_size
            except OSError:
                pass
    if files and "bundle.json" not in files and not os.path.exists(mark):
        problem = "foreign"
elif os.path.lexists(folder):
    problem = "not a folder"
if mode == "make" and problem is None:
    try:
        os.makedirs(folder, exist_ok=True)
        os.makedirs(registry, exist_ok=True)
        with open(mark, "w") as stream:
            stream.write(folder)
        probe = os.path.join(folder, ".edgeds-write-test")
        with open(probe, "w"):
            pass
        os.remove(probe)
    except OSError as error:
        problem = "cannot be written: " + (error.strerror or str(error))
existing = folder
while not os.path.exists(existing):
    existing = os.path.dirname(existing)

own = os.path.join(home, ".edgeds", "venv", "bin", "python")
found = []
for python in ([own] if os.path.exists(own) else []) + [sys.executable]:
    where = ask(python, "import edgeds, os; print(os.path.dirname(edgeds.__file__))")
    found.append({
        "python": python,
        "version": ask(python, "import edgeds; print(edgeds.__version__)") if where else None,
        "digest": digest(where) if where else None,
        "tensorrt": ask(python, "import tensorrt as t; t.Builder; print(t.__version__)"),
    })
answer = {
    "home": home, "folder": folder, "problem": problem, "files": files,
    "free_bytes": shutil.disk_usage(existing).free, "python": platform.python_version(),
    "machine": platform.machine(), "rsync": shutil.which("rsync") is not None,
    "compatible": read("/proc/device-tree/compatible"), "release": read("/etc/nv_tegra_release"), "found": found,
}
print("\n@MARKER@" + json.dumps(answer))
""".replace("@MARKER@", MARKER)

# argv: wheel, environment folder.
INSTALL = r"""
import json, os, shutil, subprocess, sys, tempfile, zipfile
wheel, folder = sys.argv[1:3]
python = os.path.join(folder, "bin", "python")
error = None

def run(command):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

def last_line(done):
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "exit code %d" % done.returncode

def put(wheel, site):
    fresh = tempfile.mkdtemp(prefix=".edgeds-", dir=site)
    try:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(fresh)
        for name in os.listdir(site):
            if name == "edgeds" or (name.startswith("edgeds-") and name.endswith(".dist-info")):
                os.rename(os.path.join(site, name), os.path.join(fresh, "old-" + name))
        for name in [n for n in os.listdir(fresh) if not n.startswith("old-")]:
            os.rename(os.path.join(fresh, name), os.path.join(site, name))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)

try:
    if not os.path.exists(python):
        # The system's packages stay visible: TensorRT and OpenCV of JetPack are there. pip is not needed.
        done = run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder])
        if done.returncode:
            error = "no environment could be made (%s); sudo apt install python3-venv" % last_line(done)
    if error is None:
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = run([python, "-c", code]).stdout.decode().strip().splitlines()[-1]
        put(wheel, site)
        script = os.path.join(folder, "bin", "edgeds")
        with open(script, "w") as stream:
            stream.write("#!%s\nimport sys\nfrom edgeds.cli.main import main\nsys.exit(main())\n" % python)
        os.chmod(script, 0o755)
        missing = [m for m in ("numpy", "tqdm") if run([python, "-c", "import " + m]).returncode]
        if missing:
            done = run([sys.executable, "-m", "pip", "install", "--quiet", "--target", site] + missing)
            if done.returncode:
                packages = " ".join("python3-" + m for m in missing)
                error = "%s missing and pip could not get it (%s); sudo apt install %s" % (
                    ", ".join(missing), last_line(done), packages)
    if error is None:
        done = run([python, "-c", "import edgeds.cli.main; print(edgeds.__version__)"])
        if done.returncode:
            error = "the installed edgeds cannot be imported: " + last_line(done)
except (OSError, ValueError, IndexError, zipfile.BadZipFile) as problem:
    error = str(problem)
print("\n@MARKER@" + json.dumps({"python": python, "error": error}))
""".replace("@MARKER@", MARKER)
