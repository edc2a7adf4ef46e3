"""Programs that reach for the host: its files, processes, network and rights. Each exits with 0 only if it succeeds."""

from __future__ import annotations

from hostile_greed import Hostile

ATTACKS = [
    # -- files of the host ---------------------------------------------------------------------------------------------
    Hostile("reading a file of the host", "contained_unless(read(CANARY))"),
    Hostile("writing a file of the host", "write(CANARY)"),
    Hostile("removing a file of the host", "os.remove(CANARY)"),
    Hostile("reading passwords", "contained_unless(works(read, '/etc/shadow') or b'root' in read('/etc/passwd'))"),
    Hostile(
        "reading the home directory",
        """
contained_unless(any(works(os.listdir, path) for path in (HOST_HOME, '/root', '/home')))
""",
    ),
    Hostile(
        "reading other places of the host",
        """
contained_unless(any(works(os.listdir, path) for path in ('/var', '/run', '/mnt', '/sys', '/boot')))
""",
    ),
    Hostile(
        "reading through a link",
        """
os.symlink(CANARY, 'link')
read('link')
""",
    ),
    Hostile("climbing out by dots", "read('/tmp/' + '../' * 40 + CANARY)"),
    Hostile("a hard link to a program with special rights", "os.link('/usr/bin/su', '/tmp/su')"),
    Hostile(
        "writing outside /tmp",
        """
places = ['/', '/usr', '/usr/bin', '/etc', '/dev', '/opt', '/lib', sys.prefix, sys.prefix + '/lib', '/proc/sys/kernel']
contained_unless(any(works(write, f'{place}/{MARK}') for place in places))
""",
    ),
    Hostile(
        "poisoning the interpreter",
        """
contained_unless(works(write, os.__file__) or works(os.chmod, os.__file__, 0o777))
""",
    ),
    Hostile(
        "overwriting the running program",
        """
contained_unless(works(write, '/proc/self/exe') or works(write, '/proc/1/exe'))
""",
    ),
    Hostile("changing its own standard input", "os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')"),
    Hostile(
        "reading devices",
        """
contained_unless(any(works(read, '/dev/' + name) for name in ('mem', 'kmsg', 'sda', 'vda', 'port', 'fuse', 'kvm')))
""",
    ),
    Hostile("making a device", "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))"),
    Hostile("opening files by their number", "call(304 if os.uname().machine == 'x86_64' else 265, 0, b'x' * 64, 0)"),
    # -- the environment and /proc -------------------------------------------------------------------------------------
    Hostile("environment variables", "contained_unless('CADENZA_CANARY' in os.environ)"),
    Hostile(
        "environment variables of other processes",
        """
for name in os.listdir('/proc'):
    if name.isdigit() and works(read, f'/proc/{name}/environ'):
        os.write(1, read(f'/proc/{name}/environ'))
sys.exit(1)
""",
    ),
    Hostile(
        "seeing processes of the host",
        """
contained_unless(len([name for name in os.listdir('/proc') if name.isdigit()]) > 2)
""",
    ),
    Hostile("process 1 without limits", "contained_unless(read('/proc/1/limits') != read('/proc/self/limits'))"),
    Hostile("asking not to die with the launcher", "contained_unless(libc.prctl(1, 0) == 0)"),
    Hostile("the root of process 1", "contained_unless(os.listdir('/proc/1/root') != os.listdir('/'))"),
    Hostile(
        "files of process 1",
        """
names = [os.readlink(f'/proc/1/fd/{name}') for name in os.listdir('/proc/1/fd')]
contained_unless(any(name.startswith('/') and not name.startswith('/memfd:') for name in names))
""",
    ),
    Hostile(
        "arguments of process 1",
        """
contained_unless(b'/work' in read('/proc/1/cmdline') or b'bind' in read('/proc/1/cmdline'))
""",
    ),
    Hostile(
        "settings of the kernel",
        """
places = ['sysrq-trigger', 'sys/kernel/core_pattern', 'sys/kernel/hostname', 'sys/vm/overcommit_memory',
    'sys/net/ipv4/ip_forward', 'sys/user/max_user_namespaces', 'self/uid_map', 'self/setgroups']
contained_unless(any(works(write, '/proc/' + place, '1') for place in places))
""",
    ),
    Hostile("hiding from the memory killer", "write('/proc/self/oom_score_adj', '-1000')"),
    # -- network -------------------------------------------------------------------------------------------------------
    Hostile("TCP to the host", "socket.create_connection(('127.0.0.1', PORT), 5)"),
    Hostile("TCP over IPv6 to the host", "socket.create_connection(('::1', PORT), 5)"),
    Hostile("TCP to the world", "socket.create_connection(('1.1.1.1', 53), 5)"),
    Hostile("UDP to the world", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))"),
    Hostile(
        "UDP by broadcast",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.sendto(b'x', ('255.255.255.255', 9))
""",
    ),
    Hostile("DNS", "socket.getaddrinfo('example.com', 80)"),
    Hostile("a Unix socket of the host", "socket.socket(socket.AF_UNIX).connect(SOCKET)"),
    Hostile("an abstract Unix socket of the host", "socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)"),
    Hostile("a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)"),
    Hostile("a packet socket", "socket.socket(17, socket.SOCK_RAW)"),
    Hostile("a netlink socket", "socket.socket(16, socket.SOCK_RAW)"),
    Hostile("a socket to the host of a virtual machine", "socket.socket(40, socket.SOCK_STREAM)"),
    Hostile("a socket to the kernel's cryptography", "socket.socket(38, socket.SOCK_SEQPACKET)"),
    # -- rights --------------------------------------------------------------------------------------------------------
    Hostile("becoming root", "os.setuid(0)"),
    Hostile("becoming root in groups", "os.setgroups([0])"),
    Hostile("a program with special rights", "os.execv('/usr/bin/su', ['su', 'root', '-c', 'true'])"),
    Hostile(
        "a program that gives itself special rights",
        """
import shutil
shutil.copy('/usr/bin/id', 'id')
os.chmod('id', 0o6777)
os.chown('id', 0, 0)
""",
    ),
    Hostile("more than the limits", "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))"),
    Hostile("more memory than the limit", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    Hostile("a better priority", "os.nice(-5)"),
    Hostile("a real-time schedule", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))"),
    Hostile(
        "a mount",
        """
if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "removing a mount",
        """
if libc.umount2(b'/tmp', 2):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "a new user namespace",
        """
if libc.unshare(0x10000000):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "a child in a new user namespace",
        """
call(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
""",
    ),
    Hostile(
        "a namespace of process 1",
        """
if libc.setns(os.open('/proc/self/ns/net', os.O_RDONLY), 0):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile("another root", "os.chroot('/tmp')"),
    Hostile("another host name", "socket.sethostname('mine')"),
    Hostile("another time", "time.clock_settime(time.CLOCK_REALTIME, 0)"),
    Hostile(
        "tracing process 1",
        """
if libc.ptrace(16, 1, None, None):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "tracing a child",
        """
child = os.fork()
if child == 0:
    time.sleep(1000)
if libc.ptrace(16, child, None, None):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "keyrings of the kernel",
        """
call(248 if os.uname().machine == 'x86_64' else 217, b'user', b'name', b'secret', 6, -3)
""",
    ),
    Hostile("watching files", "contained_unless(libc.inotify_init1(0) >= 0)"),
    Hostile("programs in the kernel", "call(321 if os.uname().machine == 'x86_64' else 280, 0, b'x' * 128, 128)"),
    Hostile("counters of the kernel", "call(298 if os.uname().machine == 'x86_64' else 241, b'x' * 128, 0, -1, -1, 0)"),
    Hostile("io_uring", "call(425, 4, b'\\0' * 256)"),
    Hostile("userfaultfd", "call(323 if os.uname().machine == 'x86_64' else 282, 1)"),
    Hostile(
        "a reboot",
        """
if libc.reboot(0x1234567):
    raise OSError(ctypes.get_errno())
""",
    ),
    Hostile(
        "system calls of another machine",
        """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
""",
        ("killed", "exited"),
    ),
    Hostile("an exit code that looks like a signal", "sys.exit(137)", ("killed",)),
]
