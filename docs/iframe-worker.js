// Browsers refuse workers to pages that are read from a disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<body></body>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(resolve => {
        const script = inside.document.createElement("script")
        script.onload = resolve
        script.src = url
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
