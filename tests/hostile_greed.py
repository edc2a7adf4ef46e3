"""Programs that take too much, or do not end, or kill. Each exits with 0 only if its attack works."""

from __future__ import annotations

from typing import NamedTuple

PRELUDE = """
import ctypes, errno, mmap, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def works(action, *arguments):
    try:
        action(*arguments)
    except (OSError, ValueError):
        return False
    return True
def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
def read(path):
    with open(path, "rb") as file:
        return file.read(4096)
def contained_unless(escaped):
    sys.exit(0 if escaped else 1)
"""
"""Before each program. So are CANARY, a file of the host; HOST_PID; HOST_HOME; PORT, SOCKET and ABSTRACT, where the
host listens; and MARK, which the names of new files contain."""


class Hostile(NamedTuple):
    """A program and the outcomes that contain it."""

    name: str
    code: str
    outcomes: tuple[str, ...] = ("exited",)
    kind: str = "patient"
    """Of the sandbox: `patient`, or one with little time, `short_wall` or `short_cpu`."""


GREED = [
    # -- too much of something -----------------------------------------------------------------------------------------
    Hostile(
        "a fork bomb",
        """
while True:
    works(os.fork)
""",
        ("cpu_time",),
        "short_cpu",
    ),
    Hostile(
        "a fork bomb that stops at the limit",
        """
while True:
    os.fork()
""",
    ),
    Hostile(
        "a fork bomb whose children start sessions of their own",
        """
while True:
    if os.fork() == 0:
        os.setsid()
""",
    ),
    Hostile(
        "threads without end",
        """
while True:
    threading.Thread(target=time.sleep, args=(1000,)).start()
""",
        ("exited", "wall_time"),
        "short_wall",
    ),
    Hostile(
        "a swarm of zombies",
        """
while True:
    if os.fork() == 0:
        os._exit(0)
""",
    ),
    Hostile(
        "a memory hog",
        """
held = []
while True:
    held.append(bytearray(1 << 20))
""",
    ),
    Hostile(
        "memory in many children",
        """
for _ in range(10):
    if os.fork() == 0:
        held = os.urandom(40 << 20); time.sleep(1000)
time.sleep(1000)
""",
        ("memory",),
    ),
    Hostile(
        "memory in many children that hide it",
        """
for _ in range(10):
    if os.fork() == 0:
        libc.prctl(4, 0)
        held = os.urandom(40 << 20); time.sleep(1000)
time.sleep(1000)
""",
        ("memory",),
    ),
    Hostile(
        "shared memory in many children",
        """
for _ in range(10):
    if os.fork() == 0:
        held = mmap.mmap(-1, 40 << 20)
        for i in range(0, 40 << 20, 4096):
            held[i] = 1
        time.sleep(1000)
time.sleep(1000)
""",
        ("memory",),
    ),
    Hostile(
        "memory in the buffers of connections",
        """
server = socket.create_server(('127.0.0.1', 0))
held = []
for _ in range(10):
    works(os.fork)
    held += [socket.create_connection(server.getsockname()), server.accept()[0]]
    for connection in held[-2:]:
        connection.setblocking(False)
        while works(connection.send, bytes(1 << 16)):
            pass
time.sleep(1000)
""",
        ("memory",),
    ),
    Hostile(
        "System V memory, which nobody's size includes",
        """
call(29 if os.uname().machine == 'x86_64' else 194, 0, 1 << 30, 0o600)
""",
    ),
    Hostile("memory files, which nobody's size includes", "os.memfd_create('hog')"),
    Hostile(
        "an endless loop",
        """
while True:
    pass
""",
        ("cpu_time",),
        "short_cpu",
    ),
    Hostile(
        "an endless loop that is shared out to children",
        """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
for _ in range(4):
    os.fork()
while True:
    pass
""",
        ("cpu_time",),
        "short_cpu",
    ),
    Hostile(
        "CPU time of children that nobody waits for",
        """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if works(os.fork) and os.getppid() != 1:
        sum(range(10 ** 6))
        os._exit(0)
""",
        ("wall_time", "cpu_time"),
        "short_wall",
    ),
    Hostile(
        "endless output",
        """
while True:
    print('x' * 1000)
""",
        ("output",),
    ),
    Hostile(
        "endless output on stderr",
        """
while True:
    os.write(2, b'x' * 1000)
""",
        ("output",),
    ),
    Hostile(
        "endless output of children",
        """
os.fork()
os.fork()
while True:
    os.write(1, bytes(range(256)))
""",
        ("output",),
    ),
    Hostile(
        "output that is not text",
        """
os.write(1, bytes(range(256)) * 10)
os.write(2, bytes(range(255, -1, -1)))
sys.exit(1)
""",
    ),
    Hostile(
        "deep recursion",
        """
sys.setrecursionlimit(1 << 30)
def dig(n):
    return dig(n + 1) + 1
dig(0)
""",
        ("exited", "killed"),
    ),
    Hostile("deep recursion of the compiler", "eval('-' * 10 ** 6 + '1')", ("exited", "killed")),
    Hostile(
        "a full /tmp",
        """
for number in range(1000):
    write(f'/tmp/{MARK}{number}', 'x' * (1 << 20))
""",
    ),
    Hostile(
        "a full /dev/shm",
        """
for number in range(1000):
    write(f'/dev/shm/{MARK}{number}', 'x' * (1 << 20))
""",
    ),
    Hostile(
        "very many files",
        """
for number in range(10 ** 7):
    os.mkdir(f'/tmp/{MARK}{number}')
""",
        ("files", "exited"),
    ),
    Hostile(
        "directories in directories",
        """
while True:
    os.mkdir('d')
    os.chdir('d')
""",
        ("files",),
    ),
    Hostile(
        "a huge file with nothing in it",
        """
with open('hole', 'wb') as file:
    file.truncate(1 << 40)
""",
    ),
    Hostile(
        "a file that grows",
        """
with open('big', 'wb') as file:
    while True:
        file.write(bytes(1 << 20))
""",
    ),
    Hostile(
        "very many open files",
        """
held = []
while True:
    held.append(open('/dev/null'))
""",
    ),
    Hostile(
        "very many pipes",
        """
while True:
    os.write(os.pipe()[1], bytes(4096))
""",
    ),
    # -- staying alive -------------------------------------------------------------------------------------------------
    Hostile(
        "all signals ignored",
        """
for number in range(1, 65):
    works(signal.signal, number, signal.SIG_IGN)
time.sleep(1000)
""",
        ("wall_time",),
        "short_wall",
    ),
    Hostile(
        "standard streams closed",
        """
for fd in range(3):
    os.close(fd)
time.sleep(1000)
""",
        ("wall_time",),
        "short_wall",
    ),
    Hostile("a program that stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("wall_time",), "short_wall"),
    Hostile(
        "reading what never comes",
        """
pair = socket.socketpair()
pair[0].recv(1)
""",
        ("wall_time",),
        "short_wall",
    ),
    Hostile(
        "a daemon left behind",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        libc.prctl(1, 0)
        time.sleep(1000)
    os._exit(0)
sys.exit(1)
""",
    ),
    Hostile(
        "a child left behind that holds the output open",
        """
if os.fork() == 0:
    time.sleep(1000)
os._exit(1)
""",
    ),
    Hostile(
        "a child in a process group of its own",
        """
if os.fork() == 0:
    os.setpgid(0, 0)
    time.sleep(1000)
os._exit(1)
""",
    ),
    Hostile(
        "a crash that wants to leave a core file",
        """
resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
os.abort()
""",
    ),
    Hostile("a crash", "os.abort()", ("killed",)),
    # -- killing -------------------------------------------------------------------------------------------------------
    Hostile(
        "killing the parent",
        """
os.kill(os.getppid(), signal.SIGKILL)
sys.exit(1)
""",
    ),
    Hostile(
        "stopping the parent",
        """
os.kill(os.getppid(), signal.SIGSTOP)
sys.exit(1)
""",
    ),
    Hostile(
        "killing all",
        """
os.kill(-1, signal.SIGKILL)
sys.exit(1)
""",
    ),
    Hostile("killing a process of the host", "os.kill(HOST_PID, signal.SIGTERM)"),
]
