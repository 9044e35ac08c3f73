/* A disk that takes its time: loaded with LD_PRELOAD into an engine whose records are read and written
 * by threads (io_uring goes past it).
 *
 *     cc -shared -fPIC -O2 -o slow_disk.so slow_disk.c
 *     SLOW_DISK_FOLDER=/var/cache/kv SLOW_DISK_FILE=/tmp/delay LD_PRELOAD=./slow_disk.so ...
 *
 * Each preadv and pwritev of a file in that folder first waits for as many microseconds as the file
 * says in decimal digits; without the file, or with nothing in it, for none. It may be rewritten at any
 * time. Everything else is the C library's own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*vector_call)(int, const struct iovec *, int, off_t);

static int is_in_folder(int fd) {
  const char *folder = getenv("SLOW_DISK_FOLDER");
  char link[64], path[4096];
  if (folder == NULL) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return strncmp(path, folder, strlen(folder)) == 0;
}

static void wait_as_told(int fd) {
  const char *file = getenv("SLOW_DISK_FILE");
  char digits[16] = "";
  if (file == NULL || !is_in_folder(fd)) return;
  const int told = open(file, O_RDONLY | O_CLOEXEC);
  if (told < 0) return;
  const ssize_t length = read(told, digits, sizeof digits - 1);
  close(told);
  const long delay_us = length > 0 ? strtol(digits, NULL, 10) : 0;
  if (delay_us > 0) usleep((useconds_t)delay_us);
}

static ssize_t carry_out(const char *name, int fd, const struct iovec *parts, int count, off_t at) {
  const vector_call original = (vector_call)dlsym(RTLD_NEXT, name);
  wait_as_told(fd);
  return original(fd, parts, count, at);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
  return carry_out("preadv", fd, parts, count, at);
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t at) {
  return carry_out("preadv64", fd, parts, count, at);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
  return carry_out("pwritev", fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) {
  return carry_out("pwritev64", fd, parts, count, at);
}
