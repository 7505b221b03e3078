/* Fail the n-th call of the C library on files in a folder (see run.py).

   LD_PRELOAD loads this library, so it sees the calls of Python and of all other libraries. It does
   nothing before the process calls fault_arm. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* Flags of the kinds of calls; fault_arm takes a sum of them. */
enum { OPEN = 1, CREATE = 2, READ = 4, WRITE = 8, SYNC = 16, NAME = 32, MAP = 64, LOOK = 128 };
enum { KILL = -1, SHORT = -2 }; /* instead of an errno */

static char prefix[4096];
static int armed, wanted, code, sticky, journal = -1;
static long at;
static atomic_long seen;
static char what[5000];

/* Count calls of the given kinds. The n-th call fails with an errno, KILL or SHORT; if ``stays``,
   so do all later ones. Writes and syncs are recorded in the file descriptor ``notes``. */
void fault_arm(const char *folder, int kinds, long n, int error, int stays, int notes) {
  snprintf(prefix, sizeof prefix, "%s", folder);
  wanted = kinds, at = n, code = error, sticky = stays, journal = notes;
  atomic_store(&seen, 0);
  what[0] = 0;
  armed = 1;
}

long fault_disarm(void) {
  armed = 0;
  return seen;
}

const char *fault_what(void) { return what; }

static int inside(const char *path) { return strncmp(path, prefix, strlen(prefix)) == 0; }

static int path_of(int fd, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, size - 1);
  path[length < 0 ? 0 : length] = 0;
  return length > 0 && inside(path);
}

static int path_at(int dir, const char *name, char *path, size_t size) {
  char parent[4096] = "";
  if (name && name[0] != '/' && dir != AT_FDCWD) path_of(dir, parent, sizeof parent);
  snprintf(path, size, "%s%s%s", parent, parent[0] ? "/" : "", name ? name : "");
  return inside(path);
}

/* What to do with a call: 0 nothing, SHORT, or an errno. */
static int decide(int kind, const char *call, const char *path) {
  if (!(kind & wanted)) return 0;
  long n = atomic_fetch_add(&seen, 1);
  if (n != at && !(sticky && n > at)) return 0;
  if (n == at) snprintf(what, sizeof what, "%s %s", call, path);
  if (code == KILL) {
    if (journal >= 0) dprintf(journal, "K %s\n", what);
    kill(getpid(), SIGKILL);
  }
  return code;
}

static int by_path(int kind, const char *call, int dir, const char *name) {
  char path[9000];
  int saved = errno, failed = 0;
  if (armed && path_at(dir, name, path, sizeof path)) failed = decide(kind, call, path);
  errno = saved;
  return failed;
}

static int by_fd(int kind, const char *call, int fd) {
  char path[4096];
  int saved = errno, failed = 0;
  if (armed && path_of(fd, path, sizeof path)) failed = decide(kind, call, path);
  errno = saved;
  return failed;
}

/* Notes for a loss of power: W inode (has data that may be lost), S inode (synced), E parent inode
   and child inode (an entry that may be lost). */
static void note_fd(char letter, int fd) {
  struct stat found;
  char path[4096];
  int saved = errno;
  if (armed && journal >= 0 && path_of(fd, path, sizeof path) && fstat(fd, &found) == 0)
    dprintf(journal, "%c %lu\n", letter, (unsigned long)found.st_ino);
  errno = saved;
}

static void note_entry(int dir, const char *name) {
  char path[9000];
  struct stat child, parent;
  int saved = errno;
  if (armed && journal >= 0 && path_at(dir, name, path, sizeof path) && syscall(SYS_newfstatat, AT_FDCWD, path, &child, AT_SYMLINK_NOFOLLOW) == 0) {
    *strrchr(path, '/') = 0;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &parent, 0) == 0)
      dprintf(journal, "E %lu %lu\n", (unsigned long)parent.st_ino, (unsigned long)child.st_ino);
  }
  errno = saved;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FAIL(error, value) do { int error_ = (error); if (error_ > 0) { errno = error_; return value; } } while (0)

#define OPENAT(symbol, parameters, dir, call) \
  int symbol parameters { \
    REAL(symbol); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
    int makes = (flags & O_CREAT) && syscall(SYS_faccessat, dir, path, F_OK, 0) != 0; \
    int writes = (flags & O_ACCMODE) != O_RDONLY; \
    FAIL(by_path(writes ? CREATE : OPEN, "open", dir, path), -1); \
    int fd = real call; \
    if (fd >= 0 && makes) note_entry(dir, path); \
    if (fd >= 0 && (makes || (flags & O_TRUNC))) note_fd('W', fd); \
    return fd; \
  }
OPENAT(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENAT(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENAT(openat, (int dir, const char *path, int flags, ...), dir, (dir, path, flags, mode))
OPENAT(openat64, (int dir, const char *path, int flags, ...), dir, (dir, path, flags, mode))

#define MOVE(symbol, kind, parameters, fd, short_call, call) \
  ssize_t symbol parameters { \
    REAL(symbol); \
    int failed = by_fd(kind, #symbol, fd); \
    FAIL(failed, -1); \
    if (kind == WRITE) note_fd('W', fd); \
    if (failed == SHORT && size > 1) return real short_call; \
    return real call; \
  }
MOVE(read, READ, (int fd, void *data, size_t size), fd, (fd, data, size / 2), (fd, data, size))
MOVE(pread, READ, (int fd, void *data, size_t size, off_t from), fd, (fd, data, size / 2, from), (fd, data, size, from))
MOVE(pread64, READ, (int fd, void *data, size_t size, off64_t from), fd, (fd, data, size / 2, from), (fd, data, size, from))
MOVE(write, WRITE, (int fd, const void *data, size_t size), fd, (fd, data, size / 2), (fd, data, size))
MOVE(pwrite, WRITE, (int fd, const void *data, size_t size, off_t to), fd, (fd, data, size / 2, to), (fd, data, size, to))
MOVE(pwrite64, WRITE, (int fd, const void *data, size_t size, off64_t to), fd, (fd, data, size / 2, to), (fd, data, size, to))
MOVE(sendfile, WRITE, (int fd, int in, off_t *from, size_t size), fd, (fd, in, from, size / 2), (fd, in, from, size))
MOVE(sendfile64, WRITE, (int fd, int in, off64_t *from, size_t size), fd, (fd, in, from, size / 2), (fd, in, from, size))

struct iovec;
#define VECTOR(symbol, kind, parameters, call) \
  ssize_t symbol parameters { REAL(symbol); FAIL(by_fd(kind, #symbol, fd), -1); if (kind == WRITE) note_fd('W', fd); return real call; }
extern ssize_t readv(int, const struct iovec *, int), writev(int, const struct iovec *, int);
extern ssize_t preadv(int, const struct iovec *, int, off_t), pwritev(int, const struct iovec *, int, off_t);
VECTOR(readv, READ, (int fd, const struct iovec *parts, int count), (fd, parts, count))
VECTOR(writev, WRITE, (int fd, const struct iovec *parts, int count), (fd, parts, count))
VECTOR(preadv, READ, (int fd, const struct iovec *parts, int count, off_t from), (fd, parts, count, from))
VECTOR(pwritev, WRITE, (int fd, const struct iovec *parts, int count, off_t to), (fd, parts, count, to))

#define ON_FD(symbol, kind, letter, parameters, call) \
  int symbol parameters { REAL(symbol); FAIL(by_fd(kind, #symbol, fd), -1); int done = real call; if (done == 0) note_fd(letter, fd); return done; }
ON_FD(fsync, SYNC, 'S', (int fd), (fd))
ON_FD(fdatasync, SYNC, 'S', (int fd), (fd))
ON_FD(ftruncate, WRITE, 'W', (int fd, off_t size), (fd, size))
ON_FD(ftruncate64, WRITE, 'W', (int fd, off64_t size), (fd, size))

#define ON_PATH(symbol, kind, parameters, dir, path, after, call) \
  int symbol parameters { REAL(symbol); FAIL(by_path(kind, #symbol, dir, path), -1); int done = real call; if (done == 0) { after; } return done; }
ON_PATH(rename, NAME, (const char *from, const char *to), AT_FDCWD, to, note_entry(AT_FDCWD, to), (from, to))
ON_PATH(renameat, NAME, (int d, const char *from, int e, const char *to), e, to, note_entry(e, to), (d, from, e, to))
ON_PATH(renameat2, NAME, (int d, const char *from, int e, const char *to, unsigned flags), e, to, if (!(flags & RENAME_EXCHANGE)) note_entry(e, to), (d, from, e, to, flags))
ON_PATH(mkdir, NAME, (const char *path, mode_t mode), AT_FDCWD, path, note_entry(AT_FDCWD, path), (path, mode))
ON_PATH(mkdirat, NAME, (int dir, const char *path, mode_t mode), dir, path, note_entry(dir, path), (dir, path, mode))
ON_PATH(link, NAME, (const char *from, const char *path), AT_FDCWD, path, note_entry(AT_FDCWD, path), (from, path))
ON_PATH(unlink, NAME, (const char *path), AT_FDCWD, path, (void)0, (path))
ON_PATH(unlinkat, NAME, (int dir, const char *path, int flags), dir, path, (void)0, (dir, path, flags))
ON_PATH(rmdir, NAME, (const char *path), AT_FDCWD, path, (void)0, (path))
ON_PATH(stat, LOOK, (const char *path, struct stat *out), AT_FDCWD, path, (void)0, (path, out))
ON_PATH(stat64, LOOK, (const char *path, struct stat64 *out), AT_FDCWD, path, (void)0, (path, out))
ON_PATH(lstat, LOOK, (const char *path, struct stat *out), AT_FDCWD, path, (void)0, (path, out))
ON_PATH(lstat64, LOOK, (const char *path, struct stat64 *out), AT_FDCWD, path, (void)0, (path, out))
ON_PATH(fstatat, LOOK, (int dir, const char *path, struct stat *out, int flags), dir, path, (void)0, (dir, path, out, flags))
ON_PATH(fstatat64, LOOK, (int dir, const char *path, struct stat64 *out, int flags), dir, path, (void)0, (dir, path, out, flags))

#define MAPS(symbol, offset) \
  void *symbol(void *where, size_t size, int protection, int flags, int fd, offset from) { \
    REAL(symbol); \
    if (armed && fd >= 0) FAIL(by_fd(MAP, "mmap", fd), MAP_FAILED); \
    return real(where, size, protection, flags, fd, from); \
  }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

DIR *opendir(const char *path) { REAL(opendir); FAIL(by_path(OPEN, "opendir", AT_FDCWD, path), NULL); return real(path); }
