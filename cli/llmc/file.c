#include "cli/llmc/file.h"

#include "cli/base/cli.h"
#include "cli/output/files.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

bool llmc_fail(const char *path, int64_t offset, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cli_fail(CLI_FAILURE, "%s, offset %lld: %s", path, (long long)offset, text);
    return false;
}

bool llmc_read(llmc_file *f, int64_t offset, void *to, int64_t n) {
    if (offset < 0 || n < 0 || n > f->size || offset > f->size - n)
        return llmc_fail(f->path, f->size, "the file ends, %lld bytes at offset %lld are expected", (long long)n,
                         (long long)offset);
    errno = 0;
    if (fseeko(f->file, (off_t)offset, SEEK_SET) == 0 && fread(to, 1, (size_t)n, f->file) == (size_t)n) return true;
    return llmc_fail(f->path, offset, "cannot read %lld bytes: %s", (long long)n,
                     errno ? strerror(errno) : "the file was truncated while it was read");
}

bool llmc_open(llmc_file *f, const char *path) {
    unsigned char bytes[LLMC_HEADER_BYTES];
    struct stat status;
    *f = (llmc_file){.file = input_open(path), .path = path};
    if (!f->file) return false;
    if (fstat(fileno(f->file), &status) == 0) f->size = (int64_t)status.st_size;
    if (!llmc_read(f, 0, bytes, sizeof bytes)) {
        llmc_close(f);
        return false;
    }
    for (int i = 0; i < LLMC_HEADER_WORDS; ++i) f->header[i] = (int32_t)llmc_u32(bytes + 4 * i);
    return true;
}

void llmc_close(llmc_file *f) {
    if (f->file) fclose(f->file);
    f->file = NULL;
}

bool llmc_expect(const llmc_file *f, int word, int64_t expected, const char *what) {
    if (f->header[word] == expected) return true;
    return llmc_fail(f->path, 4 * word, "%s is %d, not %lld", what, f->header[word], (long long)expected);
}

bool llmc_in_range(const llmc_file *f, int word, int64_t least, int64_t most, const char *what) {
    if (f->header[word] >= least && f->header[word] <= most) return true;
    return llmc_fail(f->path, 4 * word, "%s is %d, not in %lld..%lld", what, f->header[word], (long long)least,
                     (long long)most);
}

bool llmc_has_bytes(const llmc_file *f, int64_t bytes) {
    if (f->size == bytes) return true;
    return llmc_fail(f->path, f->size < bytes ? f->size : bytes, "the file has %lld bytes, its header asks for %lld",
                     (long long)f->size, (long long)bytes);
}

void llmc_header(unsigned char header[LLMC_HEADER_BYTES], const int32_t *words, int n) {
    memset(header, 0, LLMC_HEADER_BYTES);
    for (int i = 0; i < n; ++i) llmc_put_u32(header + 4 * i, (uint32_t)words[i]);
}
